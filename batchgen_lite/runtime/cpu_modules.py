"""Modules on the CPU: a module's tiles as they arrive, each used once on all of a sweep's rows.

Results stay transposed, [features, tokens], from GEMM to GEMM (kernels/experts/reference.py says why) and are handed on
as views, with rows apart as is best for reading them as [tokens, features]. Experts add their results to a token in
ascending expert number, whatever order they were read in and whichever are resident; with the row padding of the GEMMs
this is what makes a row's bits independent of the batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from batchgen_lite.kernels.experts.activation import sigmoid
from batchgen_lite.kernels.experts.reference import Stage, linear, most_stage_rows, stage_elements
from batchgen_lite.kernels.experts.stage_memory import StageMemory
from batchgen_lite.kernels.padding import column_stride, spans
from batchgen_lite.kernels.products import EXPERT_PADDING, product
from batchgen_lite.kernels.router.reference import route
from batchgen_lite.models.layers import Layer, Skeleton
from batchgen_lite.models.spec import ModelSpec
from batchgen_lite.offload.tiles import SHARED_EXPERT, Module, Tile
from batchgen_lite.offload.workspace import Workspace
from batchgen_lite.runtime.assignments import Assignments, assign
from batchgen_lite.runtime.cpu_experts import Crew, SideBySide
from batchgen_lite.runtime.cpu_ffn import CpuFFN, FFNMemory, Result, added_to_all, added_to_rows, by_spans
from batchgen_lite.runtime.expert_columns import expert_columns
from batchgen_lite.runtime.gathered import GatheredRows
from batchgen_lite.runtime.tile_source import TileSource
from batchgen_lite.runtime.widened_tiles import WidenedTiles


class CpuModules:
    """The weight-bearing half of CpuOperations. ``begin`` takes the scratch that weights are widened into."""

    def __init__(
        self,
        spec: ModelSpec,
        skeleton: Skeleton,
        stream: TileSource,
        workspace: Workspace,
        widened: WidenedTiles,
        crew: Crew | None = None,
    ) -> None:
        """``crew`` computes experts side by side where those are small enough; None: all cores compute each."""
        self._spec, self._skeleton = spec, skeleton
        self._stream, self._workspace, self._widened = stream, workspace, widened
        self._modules = {(module.kind, module.layer): module for module in stream.modules}
        self._scratch = StageMemory(torch.empty(0))
        self._scratch_elements = max(stage_elements(tile.matrix) for module in stream.modules for tile in module.tiles)
        self._columns = {module.layer: expert_columns(module) for module in stream.modules if module.routed}
        self._crew = crew

    def begin(self) -> None:
        """Take scratch from the workspace, which has just been rewound."""
        self._scratch = StageMemory(self._workspace.take(self._scratch_elements))

    def run(self, kind: str, layer: int, x: torch.Tensor, tokens: int) -> torch.Tensor:
        """See Operations.module."""
        if kind == "experts":
            return self._experts(self._skeleton.layers[layer], x, tokens)
        if kind == "dense":
            return self._dense(self._modules["dense", layer], self._skeleton.layers[layer], x)
        if kind in ("absorb_k", "absorb_v"):
            return self._per_head(self._modules[kind, layer], x, transposed=kind == "absorb_k").t()
        return self._linear(self._modules[kind, layer], x).t()

    def _stages(self, tile: Tile, parts: Sequence[torch.Tensor]) -> Iterator[Stage]:
        return self._widened.stages(tile, parts, self._scratch)

    def _linear(self, module: Module, x: torch.Tensor) -> torch.Tensor:
        """W x^T for a module of one matrix: [matrix rows, T]."""
        out = _transposed(self._workspace, module.tiles[-1].stop, x.shape[0])
        for tile, parts in self._stream.tiles(module):
            linear(self._stages(tile, parts), x, out)
        return out

    def _per_head(self, module: Module, x: torch.Tensor, *, transposed: bool) -> torch.Tensor:
        """Each head's own matrix on its own columns of ``x`` [T, heads * width]; [heads * result, T].

        The module's matrix holds heads of ``row_step`` rows. ``transposed`` multiplies with W(h)^T.
        """
        matrix = module.tiles[0].matrix
        rows, cols = matrix.row_step, matrix.cols
        size, width = (cols, rows) if transposed else (rows, cols)
        out = _transposed(self._workspace, matrix.rows // rows * size, x.shape[0])
        for tile, parts in self._stream.tiles(module):
            for start, stop, weights in self._stages(tile, parts):
                for head in range(start // rows, stop // rows):
                    own = weights[head * rows - start : (head + 1) * rows - start]
                    own = own.t().contiguous() if transposed else own
                    at = head * width
                    for first, end in spans(x.shape[0]):
                        result = product(own, x[first:end, at : at + width])
                        out[head * size : (head + 1) * size, first:end].copy_(result)
        return out

    def _dense(self, module: Module, layer: Layer, x: torch.Tensor) -> torch.Tensor:
        spec = layer.spec.dense
        assert spec is not None
        out = self._workspace.take(x.shape[0], self._spec.hidden_size).zero_()
        ffn = self._ffn(layer, module.tiles[0], x, None, added_to_all(out))
        for tile, parts in self._stream.tiles(module):
            ffn.feed(tile, parts)
        return out

    def _experts(self, layer: Layer, x: torch.Tensor, tokens: int) -> torch.Tensor:
        """Route all tokens at once, then run each chosen expert on its tokens as its weights arrive."""
        spec = layer.spec.router
        assert spec is not None
        logits = self._linear(self._modules["router", layer.index], x)[:, :tokens].t().contiguous()  # [T, E]
        if layer.router_bias is not None:
            logits.add_(layer.router_bias)
        ids, weights = route(logits, spec, layer.correction_bias)
        chosen = assign(ids, weights, spec.num_experts, EXPERT_PADDING)
        delta = self._workspace.take(x.shape[0], self._spec.hidden_size).zero_()
        module = self._modules["experts", layer.index]
        if self._crew is not None and self._crew.source.can_hold(module):
            columns = self._columns[layer.index]
            beside = SideBySide(self._crew, self._workspace, self._scratch, layer, module, columns, x, delta, chosen)
            if beside.rows:
                beside.run(lambda tile: self._expert(layer, tile, x, chosen, delta))
                return delta
        mark = self._workspace.mark()
        current, ffn = None, None
        for tile, parts in self._stream.tiles(module, chosen.counts):
            if tile.expert != current:
                self._workspace.rewind(mark)
                current = tile.expert
                ffn = self._expert(layer, tile, x, chosen, delta)
            assert ffn is not None
            ffn.feed(tile, parts)
        return delta

    def _expert(self, layer: Layer, tile: Tile, x: torch.Tensor, chosen: Assignments, delta: torch.Tensor) -> CpuFFN:
        """Adds what the expert whose first tile is ``tile`` makes of its rows of ``x`` to those of ``delta``."""
        if tile.expert == SHARED_EXPERT:
            return self._ffn(layer, tile, x, _shared_gate(layer, x), added_to_all(delta))
        rows = chosen.of(tile.expert)
        assert layer.spec.expert is not None
        count, columns = len(rows.index), self._columns[layer.index]
        memory = self._workspace.take(count * columns.gate_up)
        own = GatheredRows(memory, count, x.shape[1], columns.gate_up).gather(x, rows.index)
        intermediate, stage_rows = layer.spec.expert.intermediate, most_stage_rows(tile.matrix)
        ffn_memory = FFNMemory(self._workspace, intermediate, count, stage_rows, columns.down)
        result = added_to_rows(delta, rows.tokens, count, self._workspace)

        def stages(each: Tile, parts: Sequence[torch.Tensor]) -> Iterator[Stage]:
            return self._widened.stages(each, parts, self._scratch, columns.of(each))

        return CpuFFN(ffn_memory, stages, layer.spec.expert, layer.ffns[tile.expert], own, rows.weights, result)

    def _ffn(self, layer: Layer, tile: Tile, x: torch.Tensor, scale: torch.Tensor | None, result: Result) -> CpuFFN:
        """Of all tokens: a layer's dense network or its shared expert, whose first tile is ``tile``."""
        spec = layer.spec.dense or layer.spec.shared
        assert spec is not None
        memory = FFNMemory(self._workspace, spec.intermediate, len(x), most_stage_rows(tile.matrix))
        return CpuFFN(memory, self._stages, spec, layer.ffns[tile.expert], by_spans(x), scale, result)

    def head(self, x: torch.Tensor, rows: int) -> torch.Tensor:
        """Logits fp32 [rows, vocab] of the first ``rows`` of ``x`` [padded rows, H]."""
        module = self._modules["head", -1]
        if not rows:
            for _ in self._stream.tiles(module):  # keep the stream in step; nothing to compute
                pass
            return torch.empty(0, self._spec.vocab_size)
        logits = self._workspace.take(rows, self._spec.vocab_size)
        for tile, parts in self._stream.tiles(module):
            for start, stop, weights in self._stages(tile, parts):
                for first, end in spans(x.shape[0]):
                    own = logits[first:end, start:stop]
                    own.copy_(product(weights, x[first:end])[:, : len(own)].t())
        if self._skeleton.head_bias is not None:
            logits.add_(self._skeleton.head_bias)
        if self._spec.logit_scale != 1.0:
            logits.mul_(self._spec.logit_scale)
        return logits


def _transposed(workspace: Workspace, features: int, tokens: int) -> torch.Tensor:
    """A result [features, tokens] that others will read transposed."""
    return workspace.take(features, column_stride(tokens))[:, :tokens]


def _shared_gate(layer: Layer, x: torch.Tensor) -> torch.Tensor | None:
    """sigmoid(gate . x) per token [T], or None where the shared expert is not gated."""
    if not layer.spec.shared_gated:
        return None
    assert layer.shared_gate is not None
    return sigmoid((x * layer.shared_gate).sum(-1))
