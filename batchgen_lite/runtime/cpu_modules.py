"""Modules on the CPU: a module's tiles as they arrive, each used once on all of a sweep's rows.

Results stay transposed, [features, tokens], from GEMM to GEMM (kernels/experts/reference.py says why) and are handed on
as views, with rows apart as is best for reading them as [tokens, features]. Experts add their results to a token in
ascending expert number, whatever order they were read in and whichever are resident; with the row padding of the GEMMs
this is what makes a row's bits independent of the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch

from batchgen_lite.kernels.experts.activation import sigmoid
from batchgen_lite.kernels.experts.reference import Stage, down, gate_up, linear, stage_elements, stage_rows
from batchgen_lite.kernels.padding import SPAN_ROWS, column_stride, spans
from batchgen_lite.kernels.products import EXPERT_PADDING, product
from batchgen_lite.kernels.router.reference import route
from batchgen_lite.models.layers import FFNBiases, Layer, Skeleton
from batchgen_lite.models.spec import FFNSpec, ModelSpec
from batchgen_lite.offload.tiles import SHARED_EXPERT, Module, Tile
from batchgen_lite.offload.workspace import Workspace
from batchgen_lite.runtime.assignments import ExpertRows, assign
from batchgen_lite.runtime.widened_tiles import WidenedTiles


class TileSource(Protocol):
    """Where weights come from: a WeightStream, or one that looks at them on the way."""

    @property
    def modules(self) -> Sequence[Module]: ...

    def tiles(
        self, module: Module, counts: torch.Tensor | None = None
    ) -> Iterator[tuple[Tile, list[torch.Tensor]]]: ...


class CpuModules:
    """The weight-bearing half of CpuOperations. ``begin`` takes the scratch that weights are widened into."""

    def __init__(
        self, spec: ModelSpec, skeleton: Skeleton, stream: TileSource, workspace: Workspace, widened: WidenedTiles
    ) -> None:
        self._spec, self._skeleton = spec, skeleton
        self._stream, self._workspace, self._widened = stream, workspace, widened
        self._modules = {(module.kind, module.layer): module for module in stream.modules}
        self._scratch = torch.empty(0)
        self._scratch_elements = max(stage_elements(tile.matrix) for module in stream.modules for tile in module.tiles)

    def begin(self) -> None:
        """Take scratch from the workspace, which has just been rewound."""
        self._scratch = self._workspace.take(self._scratch_elements)

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
        columns = x.t()
        for tile, parts in self._stream.tiles(module):
            for start, stop, weights in self._stages(tile, parts):
                for head in range(start // rows, stop // rows):
                    own = weights[head * rows - start : (head + 1) * rows - start]
                    own = own.t() if transposed else own
                    at = head * width
                    torch.mm(own, columns[at : at + width], out=out[head * size : (head + 1) * size])
        return out

    def _dense(self, module: Module, layer: Layer, x: torch.Tensor) -> torch.Tensor:
        spec = layer.spec.dense
        assert spec is not None
        out = self._workspace.take(x.shape[0], self._spec.hidden_size).zero_()
        ffn = self._ffn(layer, spec, x, out)
        for tile, parts in self._stream.tiles(module):
            ffn.feed(tile, parts)
        return out

    def _experts(self, layer: Layer, x: torch.Tensor, tokens: int) -> torch.Tensor:
        """Route all tokens at once, then run each chosen expert on its tokens as its weights arrive."""
        spec = layer.spec.router
        assert spec is not None
        assert layer.spec.expert is not None
        logits = self._linear(self._modules["router", layer.index], x)[:, :tokens].t().contiguous()  # [T, E]
        if layer.router_bias is not None:
            logits.add_(layer.router_bias)
        ids, weights = route(logits, spec, layer.correction_bias)
        chosen = assign(ids, weights, spec.num_experts, EXPERT_PADDING)
        delta = self._workspace.take(x.shape[0], self._spec.hidden_size).zero_()
        mark = self._workspace.mark()
        current, ffn = None, None
        for tile, parts in self._stream.tiles(self._modules["experts", layer.index], chosen.counts):
            if tile.expert != current:
                self._workspace.rewind(mark)
                current = tile.expert
                if current == SHARED_EXPERT:
                    assert layer.spec.shared is not None
                    ffn = self._ffn(layer, layer.spec.shared, x, delta, gate=_shared_gate(layer, x))
                else:
                    ffn = self._ffn(layer, layer.spec.expert, x, delta, current, chosen.of(current))
            assert ffn is not None
            ffn.feed(tile, parts)
        return delta

    def _ffn(
        self,
        layer: Layer,
        spec: FFNSpec,
        x: torch.Tensor,
        out: torch.Tensor,
        expert: int = SHARED_EXPERT,
        rows: ExpertRows | None = None,
        gate: torch.Tensor | None = None,
    ) -> CpuFFN:
        return CpuFFN(self._workspace, self._stages, spec, layer.ffns[expert], x, out, rows, gate)

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
                    own.copy_(product(weights, x[first:end].t())[:, : len(own)].t())
        if self._skeleton.head_bias is not None:
            logits.add_(self._skeleton.head_bias)
        if self._spec.logit_scale != 1.0:
            logits.mul_(self._spec.logit_scale)
        return logits


class CpuFFN:
    """One gated feed-forward network fed with its tiles in order, on some tokens of a batch.

    Its result is linear in what is activated, so that is what a token's weight or gate scales: it is smaller than the
    result, and the result can then be added as it is.
    """

    def __init__(
        self,
        workspace: Workspace,
        stages: Callable[[Tile, Sequence[torch.Tensor]], Iterator[Stage]],
        spec: FFNSpec,
        biases: FFNBiases,
        x: torch.Tensor,
        out: torch.Tensor,
        rows: ExpertRows | None = None,
        gate: torch.Tensor | None = None,
    ) -> None:
        """``rows``: the rows of ``x`` [T, hidden] that use it and their weights, None = all, scaled by ``gate`` [T].
        Results are added to those tokens' rows of ``out`` [T, hidden]."""
        self._spec, self._biases, self._out, self._stages = spec, biases, out, stages
        self._tokens = None if rows is None else rows.tokens
        self._scale = gate if rows is None else rows.weights
        self._x = x
        if rows is not None:
            self._x = torch.index_select(x, 0, rows.index, out=workspace.take(len(rows.index), x.shape[1]))
        count = len(self._x)
        self._spans = spans(count)
        activated = workspace.take(spec.intermediate * count)
        self._activated = [  # of each span one that lies together, as products want it
            activated[spec.intermediate * first : spec.intermediate * end].view(spec.intermediate, end - first)
            for first, end in self._spans
        ]
        self._workspace = workspace
        self._factor: torch.Tensor | None = None
        self._rows: torch.Tensor | None = None
        self._scaled = False

    def feed(self, tile: Tile, parts: Sequence[torch.Tensor]) -> None:
        """Use one tile; gate_up tiles come before down tiles."""
        stages = self._stages(tile, parts)
        if tile.role == "gate_up":
            if self._factor is None:
                rows = min(tile.matrix.rows, stage_rows(tile.matrix))
                self._factor = self._workspace.take(rows * min(SPAN_ROWS, len(self._x)))
            gate_up(stages, self._x, self._spec, self._biases.gate_up, self._activated, self._factor)
            return
        if self._scale is not None and not self._scaled:
            for activated, (first, end) in zip(self._activated, self._spans, strict=True):
                activated.mul_(self._scale[first:end])
            self._scaled = True
        if self._rows is None and self._tokens is not None:
            rows = min(tile.matrix.rows, stage_rows(tile.matrix))
            self._rows = self._workspace.take(min(SPAN_ROWS, len(self._x)) * rows)
        for start, stop, number, result in down(stages, self._activated):
            first, end = self._spans[number]
            if self._biases.down is not None:
                bias = self._biases.down[start:stop, None]
                result.add_(bias if self._scale is None else bias * self._scale[first:end])
            if self._tokens is None:
                self._out[first:end, start:stop].add_(result.t())
            else:
                assert self._rows is not None
                # Turned first: a token's features lie together in ``out``, and few tokens of a large batch in caches.
                tokens = self._tokens[first:end]
                turned = self._rows[: len(tokens) * (stop - start)].view(len(tokens), stop - start)
                self._out[:, start:stop].index_add_(0, tokens, turned.copy_(result[:, : len(tokens)].t()))


def _transposed(workspace: Workspace, features: int, tokens: int) -> torch.Tensor:
    """A result [features, tokens] that others will read transposed."""
    return workspace.take(features, column_stride(tokens))[:, :tokens]


def _shared_gate(layer: Layer, x: torch.Tensor) -> torch.Tensor | None:
    """sigmoid(gate . x) per token [T], or None where the shared expert is not gated."""
    if not layer.spec.shared_gated:
        return None
    assert layer.shared_gate is not None
    return sigmoid((x * layer.shared_gate).sum(-1))
