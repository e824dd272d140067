"""Sweeps on the CPU, for the engine: one thread that computes, fed through an executor once per sweep."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import torch

from batchgen_lite.models.layers import Skeleton
from batchgen_lite.models.modules import modules_of
from batchgen_lite.models.spec import ModelSpec
from batchgen_lite.models.weights import ModelWeights
from batchgen_lite.offload.arena import Arena
from batchgen_lite.offload.budget import format_size
from batchgen_lite.offload.embedding import EmbeddingTable
from batchgen_lite.offload.kv import KVPool, kv_dtype_of
from batchgen_lite.offload.kv_shapes import kv_shapes
from batchgen_lite.offload.pages import PageAllocator
from batchgen_lite.offload.readers.protocol import Reader, ReaderStatistics
from batchgen_lite.offload.residents import choose_residents
from batchgen_lite.offload.ring import Ring
from batchgen_lite.offload.stream import StreamAborted, WeightStream
from batchgen_lite.offload.workspace import Workspace
from batchgen_lite.runtime.cpu_operations import CpuOperations
from batchgen_lite.runtime.interface import SampledToken
from batchgen_lite.runtime.planner import MemoryPlan
from batchgen_lite.runtime.sampler import Sampler, SampleRow
from batchgen_lite.runtime.scheduler import Limits
from batchgen_lite.runtime.sweep import Sweeper, SweepSpan
from batchgen_lite.runtime.work import PageChanges, SweepAborted, Work
from batchgen_lite.trace.recorder import SILENT, Recorder


@dataclass(frozen=True, slots=True)
class ModelParts:
    """A model as the runner needs it: described, its vectors loaded, its files open. ``kv_dtype``: as EngineOptions
    has it."""

    spec: ModelSpec
    weights: ModelWeights
    skeleton: Skeleton
    reader: Reader
    kv_dtype: str = "auto"


class CpuRunner:
    """Runs sweeps of one model in the memory that ``plan`` grants. Implements SweepRunner."""

    def __init__(
        self,
        model: ModelParts,
        plan: MemoryPlan,
        threads: int,
        sampler: Sampler | None = None,
        recorder: Recorder = SILENT,
    ) -> None:
        self.plan = plan
        self.allocator = PageAllocator(plan.kv_pages)
        self._limits = Limits(plan.token_budget, plan.max_sequences, plan.kv_pages)
        self._aborted = False
        self._sampler = sampler or Sampler()
        self._reader = model.reader
        self._engine = ThreadPoolExecutor(1, "engine", initializer=torch.set_num_threads, initargs=(threads,))
        modules = modules_of(model.spec, model.weights)
        residents = choose_residents(modules, plan.resident_bytes, model.reader.alignment)
        ring = None if plan.ring_bytes == 0 else Ring(Arena(plan.ring_bytes), model.reader.alignment)
        self._ring = ring
        self.stream = WeightStream(modules, model.reader, ring, residents, recorder)
        self._embedding = EmbeddingTable(model.weights.embedding, model.reader, resident=plan.embedding_resident)
        self._kv = KVPool(kv_shapes(model.spec), plan.kv_pages, kv_dtype_of(model.kv_dtype, model.spec.dtype))
        self._workspace = Workspace(plan.workspace_bytes)
        operations = CpuOperations(model.spec, model.skeleton, self.stream, self._embedding, self._kv, self._workspace)
        self._sweeper = Sweeper(operations, self.stream, plan.slice_tokens, recorder)

    def limits(self) -> Limits:
        return self._limits

    def abort(self) -> None:
        self._aborted = True
        self.stream.abort()

    def rearm(self) -> None:
        """Forget an earlier ``abort``, for the next run."""
        self._aborted = False
        self.stream.rearm()

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
            with torch.inference_mode():
                self._sweeper.run(spans, sample)
        except StreamAborted:
            self.stream.reset()
            raise SweepAborted from None
        except MemoryError:
            self.stream.reset()
            smaller = self._limits.token_budget // 2
            if smaller < 1:
                raise
            self._limits = replace(
                self._limits, token_budget=smaller, max_sequences=min(self._limits.max_sequences, smaller)
            )
            raise
        except BaseException:
            self.stream.reset()
            raise
        tokens = iter(sampled)
        return [next(tokens) if item.wants_logits else None for item in work]

    def reader_statistics(self) -> ReaderStatistics:
        """What the reader has done since it was opened."""
        return self._reader.statistics()

    def describe(self) -> dict[str, str]:
        """Label -> text lines about where things lie."""
        plan = self.plan
        where = "all in memory" if plan.all_resident else f"{format_size(plan.resident_bytes)} in memory, rest streamed"
        return {
            "weights": f"{where}, ring of {format_size(plan.ring_bytes)}",
            "KV cache": f"{plan.kv_pages} pages of 64 tokens, {str(self._kv.dtype).removeprefix('torch.')}",
            "sweep": f"up to {plan.token_budget} tokens, {plan.max_sequences} sequences",
        }

    def close(self) -> None:
        """End the engine thread and give all memory back."""
        self._engine.shutdown(wait=True)
        self.stream.close()
        self._embedding.close()
        self._kv.close()
        self._workspace.close()
        if self._ring is not None:
            self._ring.arena.close()


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
