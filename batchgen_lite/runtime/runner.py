"""Sweeps on one device, for the engine: one thread that computes, fed through an executor once per sweep."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from collections.abc import Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import torch

from batchgen_lite.kernels.precision import full_precision
from batchgen_lite.models.layers import Skeleton
from batchgen_lite.models.modules import modules_of
from batchgen_lite.models.spec import ModelSpec
from batchgen_lite.models.weights import ModelWeights
from batchgen_lite.offload.budget import format_size
from batchgen_lite.offload.budget_accounts import MemoryAccounts
from batchgen_lite.offload.device_tier import ALIGNMENT as DEVICE_ALIGNMENT
from batchgen_lite.offload.device_tier import DeviceTier, device_footprint
from batchgen_lite.offload.devices.host import HostDevice, HostMemory
from batchgen_lite.offload.devices.protocol import Device, Lane
from batchgen_lite.offload.devices.sim import SimDevice
from batchgen_lite.offload.embedding import EmbeddingTable
from batchgen_lite.offload.kv import KVPool, kv_dtype_of, pool_bytes
from batchgen_lite.offload.kv_shapes import kv_shapes
from batchgen_lite.offload.kv_streamed import StreamedKV
from batchgen_lite.offload.pages import PageAllocator
from batchgen_lite.offload.readers.protocol import Reader, ReaderStatistics
from batchgen_lite.offload.residents import choose_residents, choose_tiles, tile_footprint
from batchgen_lite.offload.ring import Ring
from batchgen_lite.offload.spill import Spill, record_bytes
from batchgen_lite.offload.spill_file import SpillOptions, open_spill_file
from batchgen_lite.offload.spill_memory import SpillMemory
from batchgen_lite.offload.stream import StreamAborted, WeightStream
from batchgen_lite.offload.tiles import Tile
from batchgen_lite.offload.workspace import Workspace
from batchgen_lite.runtime.cost import SweepCost
from batchgen_lite.runtime.interface import SampledToken
from batchgen_lite.runtime.migration import LowerTiers, Tier
from batchgen_lite.runtime.open_operations import make_operations
from batchgen_lite.runtime.placed_model import PlacedModel
from batchgen_lite.runtime.placement import skeleton_on
from batchgen_lite.runtime.planner import MemoryPlan
from batchgen_lite.runtime.pool_to_weights import AdaptingTail, PoolToWeights
from batchgen_lite.runtime.sampler import Sampler, SampleRow
from batchgen_lite.runtime.scheduler import Limits
from batchgen_lite.runtime.spilling import SpilledSequences, spill_places
from batchgen_lite.runtime.streamed_kv import StreamedOperations
from batchgen_lite.runtime.sweep import Sweeper, SweepSpan
from batchgen_lite.runtime.widened_tiles import WidenedTiles
from batchgen_lite.runtime.work import PageChanges, SweepAborted, Work
from batchgen_lite.trace.recorder import SILENT, Recorder

LINK_RATE = 8e9  # bytes/s assumed between a device and the host until it has shown its own


@dataclass(frozen=True, slots=True)
class ModelParts:
    """A model as the runner needs it: described, its vectors loaded, its files open. ``kv_dtype`` and ``spill``: as
    EngineOptions has them; ``disk_rate``: bytes/s assumed of the spill directory's disk; ``workers``: experts that the
    CPU computes side by side."""

    spec: ModelSpec
    weights: ModelWeights
    skeleton: Skeleton
    reader: Reader
    kv_dtype: str = "auto"
    spill: SpillOptions | None = None
    disk_rate: float = 1e9
    workers: int = 1


class LocalRunner:
    """Runs sweeps of one model in the memory that ``plan`` grants. Implements SweepRunner."""

    def __init__(
        self,
        model: ModelParts,
        plan: MemoryPlan,
        threads: int,
        sampler: Sampler | None = None,
        recorder: Recorder = SILENT,
        device: Device | None = None,
    ) -> None:
        """``device``: where it computes, None = the CPU; stays its owner's. Raises BudgetError where it does not hold
        what the plan says."""
        self.plan = plan
        self.allocator = PageAllocator(plan.kv_pages)
        self._limits = Limits(plan.token_budget, plan.max_sequences, plan.kv_pages)
        self._aborted = False
        self._sampler = sampler or Sampler()
        self._reader = model.reader
        self._engine = ThreadPoolExecutor(1, "engine", initializer=torch.set_num_threads, initargs=(threads,))
        self.device = device or HostDevice()
        with contextlib.ExitStack() as stack:  # what was allocated goes back if something behind it does not fit
            self._allocate(model, recorder, stack)
            self._owned = stack.pop_all()

    def _allocate(self, model: ModelParts, recorder: Recorder, stack: contextlib.ExitStack) -> None:
        """Everything that the plan grants; ``stack`` closes it, last made first."""
        plan, device, alignment = self.plan, self.device, model.reader.alignment
        modules = modules_of(model.spec, model.weights)
        tier, on_device = None, list[Tile]()
        if device.separate:
            on_device = choose_tiles(modules, plan.device_resident_bytes, device_footprint)
            device_ring = None
            if plan.device_ring_bytes:
                memory = device.allocate(plan.device_ring_bytes)
                stack.callback(memory.close)
                device_ring = Ring(memory, DEVICE_ALIGNMENT)
            tier = DeviceTier(device, device_ring, on_device)
            stack.callback(tier.close)
        ring = None
        if plan.ring_bytes:
            arena = device.host_memory(plan.ring_bytes)
            stack.callback(arena.close)
            ring = Ring(arena, alignment)
        residents = choose_residents(modules, plan.resident_bytes, alignment, without=on_device)
        self.stream = WeightStream(modules, model.reader, ring, residents, recorder, tier)
        stack.callback(self.stream.close)
        embedding = EmbeddingTable(model.weights.embedding, model.reader, resident=plan.embedding_resident)
        stack.callback(embedding.close)
        dtype = kv_dtype_of(model.kv_dtype, model.spec.dtype)
        shapes = kv_shapes(model.spec)
        kv_bytes, streamed = max(1, pool_bytes(shapes, plan.kv_pages, dtype)), plan.kv_window_pages > 0
        kv_memory = device.host_memory(kv_bytes) if streamed else device.allocate(kv_bytes, piecemeal=True)
        stack.callback(kv_memory.close)
        self._kv = KVPool(shapes, plan.kv_pages, dtype, kv_memory.tensor)
        stack.callback(self._kv.close)
        self.exchange: PoolToWeights | None = None
        if isinstance(kv_memory, HostMemory):
            self.exchange = PoolToWeights(
                self._kv,
                kv_memory,
                self.allocator,
                self.stream,
                residents,
                lambda tile: tile_footprint(tile, alignment),
            )
        self._streamed_kv = None
        if streamed:
            latent = [layer.attention.is_mla for layer in model.spec.layers]
            watch = device.computes if isinstance(device, SimDevice) else None
            self._streamed_kv = StreamedKV(self._kv, latent, device, plan.kv_window_pages, watch)
            stack.callback(self._streamed_kv.close)
        self.tiers: dict[Tier, Spill] = {}  # the fastest first
        pool_device = HostDevice() if streamed else device
        if plan.held_pages:
            store = SpillMemory(record_bytes(self._kv), plan.held_pages)
            stack.callback(store.close)
            self.tiers[Tier.HOST] = Spill(self._kv, store, LINK_RATE, pool_device)
            stack.callback(self.tiers[Tier.HOST].close)
        if model.spill is not None:
            file = open_spill_file(model.spill, record_bytes(self._kv))
            stack.callback(file.close)
            self.tiers[Tier.DISK] = Spill(self._kv, file, model.disk_rate, pool_device)
            stack.callback(self.tiers[Tier.DISK].close)
        self._workspace = Workspace(plan.workspace_bytes, device)
        stack.callback(self._workspace.close)
        skeleton, vectors = skeleton_on(device, model.skeleton)
        if vectors is not None:
            stack.callback(vectors.close)
        seen = self._kv if self._streamed_kv is None else self._streamed_kv.window
        widened = WidenedTiles(plan.widened_bytes)
        stack.callback(widened.close)
        placed = PlacedModel(
            device,
            model.spec,
            skeleton,
            self.stream,
            embedding,
            seen,
            self._workspace,
            plan.staging_bytes,
            widened,
            model.workers,
        )
        self._operations = make_operations(placed, stack)
        if self._streamed_kv is not None:
            self._operations = StreamedOperations(self._operations, self._streamed_kv)
        self._sweeper = Sweeper(
            self._operations, self.stream, plan.slice_tokens, recorder, plan.kv_window_pages or None
        )
        stack.callback(_drain, device)

    def limits(self) -> Limits:
        """See SweepRunner.limits. The pool may have become smaller since it was planned."""
        return replace(self._limits, capacity_pages=self.allocator.capacity)

    def abort(self) -> None:
        self._aborted = True
        self.stream.abort()

    def rearm(self, accounts: MemoryAccounts) -> None:
        """Forget an earlier ``abort`` and what the tail of the last run did to the division, for the next run."""
        self._aborted = False
        self.stream.rearm()
        if self.exchange is not None:
            self._engine.submit(self.exchange.undo, accounts).result()

    async def run(self, work: Seq[Work], changes: PageChanges) -> list[SampledToken | None]:
        """See SweepRunner.run."""
        return await asyncio.get_running_loop().run_in_executor(self._engine, self._sweep, work, changes)

    def _sweep(self, work: Seq[Work], changes: PageChanges) -> list[SampledToken | None]:
        if self._aborted:
            raise SweepAborted
        self._kv.scrub(changes.fresh)
        self._kv.copy(changes.copies)
        spans = [
            SweepSpan(
                item.sequence.tokens[item.start : item.start + item.count],
                item.start,
                item.sequence.table.pages,
                item.wants_logits,
            )
            for item in work
        ]
        rows = [_sample_row(item) for item in work if item.wants_logits]
        sampled: list[SampledToken] = []

        def sample(logits: torch.Tensor, first: int) -> None:
            sampled.extend(self._sampler.sample(logits, rows[first : first + logits.shape[0]]))

        try:
            with torch.inference_mode(), full_precision():
                self._sweeper.run(spans, sample)
        except StreamAborted:
            self.stream.reset()
            raise SweepAborted from None
        except (MemoryError, torch.OutOfMemoryError) as error:
            self.stream.reset()
            smaller = self._limits.token_budget // 2
            if smaller < 1:
                raise
            self._limits = replace(
                self._limits, token_budget=smaller, max_sequences=min(self._limits.max_sequences, smaller)
            )
            if isinstance(error, MemoryError):
                raise
            raise MemoryError(str(error)) from error
        except BaseException:
            self.stream.reset()
            raise
        finally:
            if self._streamed_kv is not None:
                with torch.inference_mode():  # copies that are still queued may be into the sweep's own tensors
                    self._streamed_kv.settle()
        tokens = iter(sampled)
        return [next(tokens) if item.wants_logits else None for item in work]

    def lower_tiers(self, cost: Callable[[], SweepCost], group: int) -> LowerTiers | None:
        """Where the KV of sequences that sit out may go; ``cost``: of sweeps as calibrated by now."""
        return SpilledSequences(self.tiers, self._engine, cost, group) if self.tiers else None

    def tail_memory(self, accounts: MemoryAccounts, grown: Callable[[int], None]) -> AdaptingTail | None:
        """What gives KV memory to weights in a job's tail, None where they lie in different memories; ``grown`` is told
        of each step's bytes, which are booked in ``accounts``."""
        return None if self.exchange is None else AdaptingTail(self.exchange, self._engine, accounts, grown)

    def reader_statistics(self) -> ReaderStatistics:
        """What the reader has done since it was opened."""
        return self._reader.statistics()

    def describe(self) -> dict[str, str]:
        """Label -> text lines about where things lie."""
        plan = self.plan
        return {
            "weights": _where_weights_lie(plan, separate=self.device.separate),
            "KV cache": f"{plan.kv_pages} pages of 64 tokens, {str(self._kv.dtype).removeprefix('torch.')}"
            + ("" if self._streamed_kv is None else ", on the host, streamed layer by layer"),
            **spill_places(self.tiers),
            "maths": self._operations.describe(),
            "sweep": f"up to {plan.token_budget} tokens, {plan.max_sequences} sequences",
        }

    def close(self) -> None:
        """End the engine thread and give all memory back."""
        self._engine.shutdown(wait=True)
        self._owned.close()


def _drain(device: Device) -> None:
    """Nothing of the device's memory is in use behind this."""
    for lane in Lane:
        device.record(lane).synchronize()


def _where_weights_lie(plan: MemoryPlan, *, separate: bool) -> str:
    if not separate:
        where = "all in memory" if plan.all_resident else f"{format_size(plan.resident_bytes)} in memory, rest streamed"
        return f"{where}, ring of {format_size(plan.ring_bytes)}"
    rest = "" if plan.all_resident else ", rest streamed from the disk"
    return (
        f"{format_size(plan.device_resident_bytes)} on the device, {format_size(plan.resident_bytes)} in memory{rest}; "
        f"rings of {format_size(plan.device_ring_bytes)} and {format_size(plan.ring_bytes)}"
    )


def _sample_row(item: Work) -> SampleRow:
    tokens = item.sequence.tokens
    prompt = item.sequence.prompt_length
    return SampleRow(
        params=item.request.sampling,
        seed=item.request.seed,
        row=item.request.row,
        step=len(tokens) - prompt,
        prompt_ids=item.request.prompt_ids,
        output_ids=tokens[prompt:],
        stop_ids=item.request.stop_ids,
    )
