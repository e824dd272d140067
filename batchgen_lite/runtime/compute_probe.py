"""How long this model's own kernels take on these cores: its modules run on made-up weights of their real form.

The rate of a large matrix product says little about an expert with 16 to 128 token rows: gathering rows, widening
weights, the activation and adding results up take as long again. So the modules are timed themselves, through the
operations that a sweep uses, at a few numbers of rows each, once for every distinct form of module; of large matrices
some rows stand for all. No weight is read.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar, cast

import torch

from batchgen_lite.kernels.attention.reference import SpanRows
from batchgen_lite.kernels.padding import ROW_PADDING
from batchgen_lite.kernels.precision import full_precision
from batchgen_lite.models.layers import Layer, Skeleton
from batchgen_lite.models.spec import ModelSpec
from batchgen_lite.offload.arena import Arena
from batchgen_lite.offload.devices.host import HostDevice
from batchgen_lite.offload.embedding import EmbeddingTable
from batchgen_lite.offload.kv import KVPool
from batchgen_lite.offload.kv_shapes import kv_shapes
from batchgen_lite.offload.pages import PAGE_TOKENS
from batchgen_lite.offload.probe import DISTURBED
from batchgen_lite.offload.probe_measure import CpuSeconds, cpu_seconds
from batchgen_lite.offload.stream import WeightStream
from batchgen_lite.offload.tiles import SHARED_EXPERT, Module, Tile
from batchgen_lite.offload.workspace import Workspace
from batchgen_lite.runtime.activations import ActivationShape
from batchgen_lite.runtime.compute_times import ComputeTimes, Curve
from batchgen_lite.runtime.cost import page_visits
from batchgen_lite.runtime.made_up_tiles import EXPERTS, MadeUpTiles, part_of
from batchgen_lite.runtime.open_operations import make_operations
from batchgen_lite.runtime.operations import Operations
from batchgen_lite.runtime.placed_model import PlacedModel
from batchgen_lite.runtime.slice_state import Slice, Steps
from batchgen_lite.runtime.slices import run_slice
from batchgen_lite.runtime.sweep import HALVES

ROWS = tuple(ROW_PADDING * blocks for blocks in (1, 2, 4, 8, 16))
"""Token rows at which modules are timed."""
HEAD_ROWS = ROWS[:3]
"""The same for the head, whose results are large."""
ARENA_BYTES = 32 << 20
"""Of made-up weights, so many that the cores find few of them in their caches, as in a sweep; no more than the probe of
the disk takes."""
ROUNDS = 3
"""Everything is timed so many times, all of it before any of it again: what disturbs one round is gone in another."""
LAST_ROUND = 0.4
"""Seconds after which no further round begins: on a busy machine, or with a very large model."""
REPEATS = 2
ENOUGH = 0.008
"""Seconds from which something is not repeated within a round."""
PAGES = 64
"""Of KV that decoding rows see, FEW each; what a page costs follows from rows that see MANY each."""
FEW, MANY = 1, PAGES // ROWS[0]
VALUE = 0.01
"""Of activations and cached keys: nothing grows out of bounds, nothing becomes so small that cores are slow with it."""

Clock = Callable[[], float]
Item = TypeVar("Item", Module, Layer)


def measure_compute(
    spec: ModelSpec,
    skeleton: Skeleton,
    modules: Sequence[Module],
    activations: ActivationShape,
    kv_dtype: torch.dtype,
    *,
    clock: Clock = time.perf_counter,
    cpu_seconds: Callable[[], CpuSeconds] = cpu_seconds,
) -> ComputeTimes | None:
    """Time the model's modules: a few tenths of a second and some tens of MB, which are given back. To be called as
    ``compute_apart`` does, with the threads of a sweep. ``modules``: as modules_of gives them; ``skeleton``: of the
    model, on the host. None where other processes took so much of the cores that the times say more about them."""
    with contextlib.ExitStack() as owned, torch.inference_mode(), full_precision():
        probe = _Probe(spec, skeleton, modules, activations, kv_dtype, clock, owned)
        before_all = cpu_seconds()
        began, times = clock(), probe.times()
        for _ in range(ROUNDS - 1):
            if clock() - began >= LAST_ROUND:
                break
            times = probe.times()
        return None if cpu_seconds().disturbance_since(before_all) >= DISTURBED else times


class _Probe:
    def __init__(
        self,
        spec: ModelSpec,
        skeleton: Skeleton,
        modules: Sequence[Module],
        activations: ActivationShape,
        kv_dtype: torch.dtype,
        clock: Clock,
        owned: contextlib.ExitStack,
    ) -> None:
        self._spec, self._skeleton, self._modules = spec, skeleton, modules
        self._routers = {module.layer: module for module in modules if module.kind == "router"}
        self._clock, self._owned = clock, owned
        self._least: dict[Hashable, float] = {}  # seconds of everything timed so far
        largest = max(part_of(module.tiles).largest for module, _ in _distinct(modules, _form))
        arena = Arena(max(ARENA_BYTES, 2 * largest))
        owned.callback(arena.close)
        self._source = MadeUpTiles(modules, arena.tensor, max(EXPERTS, activations.workers))
        self._workers = activations.workers
        self._workspace = Workspace(activations.workspace_bytes(ROWS[-1], HEAD_ROWS[-1]))
        owned.callback(self._workspace.close)
        self._kv = KVPool(kv_shapes(spec), PAGES, kv_dtype)
        owned.callback(self._kv.close)
        self._operations = self._operations_of(skeleton)

    def _operations_of(self, skeleton: Skeleton) -> Operations:
        stream, embedding = cast(WeightStream, self._source), cast(EmbeddingTable, None)  # nothing is embedded here
        model = PlacedModel(
            HostDevice(), self._spec, skeleton, stream, embedding, self._kv, self._workspace, 0, workers=self._workers
        )
        return make_operations(model, self._owned)

    def times(self) -> ComputeTimes:
        """All of it, by the least of this round's and all earlier ones' seconds."""
        dense, expert = dict.fromkeys(ROWS, 0.0), dict.fromkeys(ROWS, 0.0)
        head = dict.fromkeys(HEAD_ROWS, 0.0)
        for module, count in _distinct(self._modules, _form):
            if module.kind == "head":
                for rows in HEAD_ROWS:
                    head[rows] = self._in_part(module, module.tiles, rows, partial(self._head, rows))
            elif module.kind == "experts":
                for rows in ROWS:
                    always, routed = self._experts(module, rows)
                    dense[rows] += count * always
                    expert[rows] += count * routed
            elif module.kind != "router":  # which the experts' module runs
                for rows in ROWS:
                    dense[rows] += count * self._in_part(module, module.tiles, rows, self._running(module, rows))
        visit = 0.0
        for layer, count in _distinct(self._skeleton.layers, lambda layer: layer.spec.attention):
            between, a_visit = self._between(layer, count)
            visit += count * a_visit
            for rows in ROWS:
                dense[rows] += between[rows]
        return ComputeTimes(
            dense=Curve.through(dense.items()),
            expert=Curve.through(expert.items()),
            head=Curve.through(head.items()),
            visit=visit,
        )

    # -- modules --------------------------------------------------------------------------------------------------

    def _running(self, module: Module, rows: int) -> Callable[[], object]:
        """What runs ``module`` once on ``rows`` rows."""
        x = torch.full((rows, _width(module)), VALUE)

        def run() -> object:
            self._operations.begin(rows)
            return self._operations.module(module.kind, module.layer, x, rows)

        return run

    def _head(self, rows: int) -> object:
        self._operations.begin(rows)
        return list(self._operations.head(rows))

    def _in_part(self, module: Module, tiles: Sequence[Tile], rows: int, run: Callable[[], object]) -> float:
        """Seconds of ``run`` with ``tiles`` in ``module``, of which it is given a part."""
        part = part_of(tiles)
        self._source.give(module, ())
        bare = self._best((module.index, rows, "bare"), run)
        self._source.give(module, part.tiles)
        return bare + max(0.0, self._best((module.index, rows, "fed"), run) - bare) * part.times

    def _experts(self, module: Module, rows: int) -> tuple[float, float]:
        """Seconds of what all ``rows`` tokens need (router, choice, shared expert), and of one routed expert that all
        of them choose: with the same weights for every expert, all tokens choose the same ones."""
        router = self._routers[module.layer]
        self._source.give(router, router.tiles)
        run = self._running(module, rows)
        shared = [tile for tile in module.tiles if tile.expert == SHARED_EXPERT]
        routed = [tile for tile in module.tiles if tile.expert != SHARED_EXPERT]
        self._source.give(module, ())
        bare = self._best((module.index, rows, "bare"), run)
        part = part_of(routed)
        self._source.give(module, part.tiles)
        together = max(0.0, self._best((module.index, rows, "routed"), run) - bare)
        seconds = together * part.times / max(1, self._source.experts_given)
        return self._in_part(module, shared, rows, run) if shared else bare, seconds

    # -- between modules ------------------------------------------------------------------------------------------

    def _between(self, layer: Layer, count: int) -> tuple[dict[int, float], float]:
        """Of ``count`` layers like ``layer``, seconds between their modules by decoding rows, attention over pages left
        out; and of one such layer, seconds of a query row against a page."""
        fill_pages(self._kv, layer.index)
        skeleton = replace(self._skeleton, layers=(layer,))
        operations = self._operations_of(skeleton)
        heads = self._kv.shapes[layer.index].heads

        def seconds(rows: int, pages: int) -> tuple[float, float]:
            """Of making a slice ready, and of the layer."""
            part = _decoding(rows, pages)

            def ready() -> Steps:
                operations.begin(rows)
                return run_slice(skeleton, operations.slice(part), narrow=False)

            def run() -> None:
                steps = ready()
                call = next(steps)
                while call.kind != "head":
                    ends = call.kind in HALVES
                    if call.kind in ("experts", "dense"):
                        result = call.x
                    else:
                        result = operations.module(call.kind, call.layer, call.x, rows)
                    call = steps.send(result)
                    if ends:
                        operations.end_half()

            once = self._best((layer.index, rows, pages, "ready"), ready)
            return once, max(0.0, self._best((layer.index, rows, pages, "run"), run) - once)

        def visits(rows: int, pages: int) -> float:
            return rows * page_visits(_context(pages), 1, layer.spec.attention.num_heads // heads, PAGE_TOKENS)

        for module in self._modules:
            self._source.give(module, ())
        few, many = seconds(ROWS[0], FEW)[1], seconds(ROWS[0], MANY)[1]
        visit = max(0.0, many - few) / (visits(ROWS[0], MANY) - visits(ROWS[0], FEW))
        between = {}
        for rows in ROWS:
            once, each = seconds(rows, FEW)
            between[rows] = once + count * max(0.0, each - visits(rows, FEW) * visit)
        return between, visit

    def _best(self, what: Hashable, run: Callable[[], object]) -> float:
        """Seconds of ``run``, which does ``what``, the least of all times so far: whatever disturbs makes it longer,
        nothing shorter."""
        for _ in range(REPEATS):
            began = self._clock()
            run()
            taken = self._clock() - began
            self._least[what] = min(taken, self._least.get(what, taken))
            if taken >= ENOUGH:
                break
        return self._least[what]


def fill_pages(kv: KVPool, layer: int) -> None:
    """Numbers in all pages of ``layer``: untouched memory is one page of zeros, which caches hold."""
    kv.keys[layer].fill_(1 if kv.dtype == torch.int8 else VALUE)
    kv.values[layer].fill_(1 if kv.dtype == torch.int8 else VALUE)
    for scales in kv.scales(layer) or ():
        scales.fill_(VALUE)


def _decoding(rows: int, pages: int) -> Slice:
    """One slice of ``rows`` sequences that decode, each seeing ``pages`` pages."""
    spans = [
        SpanRows(row, _context(pages), 1, [(row * pages + page) % PAGES for page in range(pages)])
        for row in range(rows)
    ]
    return Slice(0, rows, spans, range(rows), 0)


def _context(pages: int) -> int:
    """The last position of a sequence whose last page is half full."""
    return pages * PAGE_TOKENS - PAGE_TOKENS // 2


def _width(module: Module) -> int:
    """Of a module's input rows."""
    matrix = module.tiles[0].matrix
    if module.kind == "absorb_k":
        return matrix.rows
    return matrix.rows // matrix.row_step * matrix.cols if module.kind == "absorb_v" else matrix.cols


def _distinct(items: Sequence[Item], form: Callable[[Item], Hashable]) -> list[tuple[Item, int]]:
    """The first item of every form, and how many have it."""
    counts = Counter(map(form, items))
    return [(next(item for item in items if form(item) == one), count) for one, count in counts.items()]


def _form(module: Module) -> Hashable:
    """What a module's time depends on. Experts of a layer are alike."""
    first = {(tile.expert == SHARED_EXPERT, tile.role): tile.matrix for tile in reversed(module.tiles)}
    return module.kind, tuple((key, m.rows, m.cols, m.encoding) for key, m in sorted(first.items(), key=lambda e: e[0]))
