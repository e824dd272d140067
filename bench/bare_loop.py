"""A sweep without a scheduler: the yardstick for bench/roofline.py. Routing is made up before: each token has experts
drawn at random, so that experts have as many rows, padding included, as those of a router that favours none."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from batchgen_lite.kernels.attention.reference import SpanRows, paged_attention, plan_attention
from batchgen_lite.kernels.experts.reference import (
    Stage,
    down,
    gate_up,
    linear,
    most_stage_rows,
    stage_elements,
    widened,
)
from batchgen_lite.kernels.experts.stage_memory import StageMemory
from batchgen_lite.kernels.padding import SPAN_ROWS, padded, spans
from batchgen_lite.kernels.products import EXPERT_PADDING
from batchgen_lite.models.load import load_model
from batchgen_lite.models.modules import modules_of
from batchgen_lite.models.spec import FFNSpec
from batchgen_lite.offload.arena import Arena
from batchgen_lite.offload.checkpoint.matrix import Matrix
from batchgen_lite.offload.kv import KV_DTYPES, KVPool
from batchgen_lite.offload.kv_shapes import kv_shapes
from batchgen_lite.offload.pages import PAGE_TOKENS, pages_for
from batchgen_lite.offload.readers.direct import DirectReader
from batchgen_lite.offload.residents import choose_residents
from batchgen_lite.offload.ring import Ring
from batchgen_lite.offload.stream import WeightStream
from batchgen_lite.offload.tiles import SHARED_EXPERT, Module, Tile
from batchgen_lite.runtime.assignments import Assignments, assign
from batchgen_lite.runtime.cpu_ffn import by_spans
from batchgen_lite.runtime.expert_columns import expert_columns
from batchgen_lite.runtime.gathered import GatheredRows
from batchgen_lite.runtime.planner import MemoryPlan


class BareLoop:
    """``rows`` tokens through all modules of a GQA model, in the memory of ``plan``."""

    def __init__(
        self, path: Path, plan: MemoryPlan, rows: int, context: int, threads: int | None, *, all_resident: bool = False
    ) -> None:
        if threads is not None:
            torch.set_num_threads(threads)
        model = load_model(path)
        self.spec, self.rows, self.slice_rows = model.spec, rows, plan.slice_tokens
        modules = modules_of(model.spec, model.weights)
        files = model.checkpoint.files
        self._reader = DirectReader([file.path for file in files], expected=files)
        alignment = self._reader.alignment
        everything = [tile for module in modules for tile in module.tiles]
        kept = everything if all_resident else choose_residents(modules, plan.resident_bytes, alignment)
        ring = None if len(kept) == len(everything) else Ring(Arena(plan.ring_bytes), alignment)
        self.stream = WeightStream(modules, self._reader, ring, kept)
        held = {id(tile) for tile in kept}
        self.streamed_bytes = sum(tile.nbytes for tile in everything if id(tile) not in held)
        self._scratch = StageMemory(torch.empty(max(stage_elements(tile.matrix) for tile in everything)))
        self._columns = padded(rows)
        self._x = {width: torch.randn(self._columns, width) for width in {tile.matrix.cols for tile in everything}}
        self._out: dict[int, torch.Tensor] = {}
        self._chosen = self._choose()
        needed = pages_for(context + 1)
        pages = min(needed * rows, plan.kv_pages)
        self._kv = KVPool(kv_shapes(model.spec), pages, KV_DTYPES[model.spec.dtype])
        assert self._kv.arena is not None
        self._kv.arena.tensor.zero_()
        table = [[(row * needed + i) % pages for i in range(needed)] for row in range(rows)]
        self._spans = [SpanRows(row % self.slice_rows, context, 1, table[row]) for row in range(rows)]
        assert needed * PAGE_TOKENS > context

    def read_only(self) -> None:
        """Every streamed tile comes by; nothing is done with it."""
        self.stream.begin_sweep(self.rows)
        for module in self.stream.modules:
            for _ in self.stream.tiles(module, self._counts(module)):
                pass

    def sweep(self) -> None:
        """Read and compute."""
        self.stream.begin_sweep(self.rows)
        for module in self.stream.modules:
            if module.kind == "out":
                self._attend(module.layer)
            if module.kind in ("experts", "dense"):
                self._ffn(module)
            else:
                self._linear(module)

    def _counts(self, module: Module) -> torch.Tensor | None:
        """Tokens per expert."""
        if not module.routed:
            return None
        return self._chosen[module.layer].counts

    def _choose(self) -> dict[int, Assignments]:
        """Of every layer with experts, as many for each token as its router chooses."""
        generator = torch.Generator().manual_seed(0)
        chosen = {}
        for layer, spec in enumerate(self.spec.layers):
            if spec.router is not None:
                draws = torch.rand(self.rows, spec.router.num_experts, generator=generator)
                ids = draws.topk(spec.router.top_k).indices
                chosen[layer] = assign(ids, torch.ones(ids.shape), spec.router.num_experts, EXPERT_PADDING)
        return chosen

    def _stages(self, tile: Tile, parts: Sequence[torch.Tensor], columns: int = 0) -> Iterable[Stage]:
        return widened(tile.matrix, parts, (tile.start, tile.stop), self._scratch, columns)

    def _linear(self, module: Module) -> None:
        matrix = module.tiles[0].matrix
        rows = module.tiles[-1].stop
        if rows not in self._out:
            self._out[rows] = torch.empty(rows, self._columns)
        for tile, parts in self.stream.tiles(module):
            linear(self._stages(tile, parts), self._x[matrix.cols], self._out[rows])

    def _ffn(self, module: Module) -> None:
        layer = self.spec.layers[module.layer]
        hidden = self._x[self.spec.hidden_size]
        everyone = torch.arange(len(hidden))
        columns = expert_columns(module) if module.routed else None
        state = None
        delta = torch.zeros(hidden.shape)
        for tile, parts in self.stream.tiles(module, self._counts(module)):
            routed = None if tile.expert == SHARED_EXPERT else columns
            stages = self._stages(tile, parts, 0 if routed is None else routed.of(tile))
            if tile.role == "gate_up":
                if tile.start == 0 and tile.expert == SHARED_EXPERT:
                    state = _Expert(layer.dense or layer.shared, by_spans(hidden), everyone)
                elif tile.start == 0:
                    rows = self._chosen[module.layer].of(tile.expert)
                    assert columns is not None
                    count, width = len(rows.index), hidden.shape[1]
                    memory = torch.empty(count * columns.gate_up)
                    gathered = GatheredRows(memory, count, width, columns.gate_up)
                    state = _Expert(layer.expert, gathered.gather(hidden, rows.index), rows.tokens, columns.down)
                assert state is not None
                state.gate_up(tile.matrix, stages)
            else:
                assert state is not None
                for start, stop, number, result in down(stages, state.turned):
                    tokens = state.tokens[number]
                    delta[:, start:stop].index_add_(0, tokens, result[:, : len(tokens)].t())

    def _attend(self, layer: int) -> None:
        attention = self.spec.layers[layer].attention
        group = attention.num_heads // attention.num_kv_heads
        for begin in range(0, self.rows, self.slice_rows):
            part = self._spans[begin : begin + self.slice_rows]
            query = torch.ones(len(part), attention.num_heads, attention.head_dim)
            paged_attention(
                query,
                self._kv.keys[layer],
                self._kv.values[layer],
                plan_attention(part, group, attention.num_kv_heads, attention.window),
                scale=attention.scale,
                window=attention.window,
                out=torch.empty_like(query),
            )

    def close(self) -> None:
        self.stream.close()
        self._reader.close()
        self._kv.close()


class _Expert:
    """Buffers of one expert on the spans of rows ``x``, those of ``tokens`` first; ``columns``: of its down matrix."""

    def __init__(self, spec: FFNSpec | None, x: list[torch.Tensor], tokens: torch.Tensor, columns: int = 0) -> None:
        assert spec is not None
        self.spec, self._x = spec, x
        self.tokens = [tokens[first:end] for first, end in spans(sum(map(len, x)))]
        whole = [torch.zeros(columns or spec.intermediate, len(rows)) for rows in x]
        self._activated = [part[: spec.intermediate] for part in whole]
        self.turned = [part.t() for part in whole]
        self._factor: StageMemory | None = None

    def gate_up(self, matrix: Matrix, stages: Iterable[Stage]) -> None:
        if self._factor is None:
            self._factor = StageMemory(torch.empty(most_stage_rows(matrix) * SPAN_ROWS))
        gate_up(stages, self._x, self.spec, None, self._activated, self._factor)
