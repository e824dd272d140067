"""Feed-forward networks on the CPU, fed with weights tile by tile, and where their results go."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from batchgen_lite.kernels.experts.reference import Stage, down, gate_up, stage_rows
from batchgen_lite.kernels.padding import SPAN_ROWS, spans
from batchgen_lite.models.layers import FFNBiases
from batchgen_lite.models.spec import FFNSpec
from batchgen_lite.offload.tiles import Tile
from batchgen_lite.offload.workspace import Workspace

Result = Callable[[int, int, int, int, torch.Tensor], None]
"""Takes a part of a result: first and end row, first and end feature, fp32 [features, rows], which it may overwrite."""


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
        scale: torch.Tensor | None,
        result: Result,
    ) -> None:
        """``x`` fp32 [n, hidden], n padded; ``scale`` fp32 [n] or None; ``result`` takes results as they come, the
        first one after ``x`` has been used."""
        self._spec, self._biases, self._result, self._stages = spec, biases, result, stages
        self._scale, self._x = scale, x
        count = len(x)
        self._spans = spans(count)
        activated = workspace.take(spec.intermediate * count)
        self._activated = [  # of each span one that lies together, as products want it
            activated[spec.intermediate * first : spec.intermediate * end].view(spec.intermediate, end - first)
            for first, end in self._spans
        ]
        self._workspace = workspace
        self._factor: torch.Tensor | None = None
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
        for start, stop, number, result in down(stages, self._activated):
            first, end = self._spans[number]
            if self._biases.down is not None:
                bias = self._biases.down[start:stop, None]
                result.add_(bias if self._scale is None else bias * self._scale[first:end])
            self._result(first, end, start, stop, result)


def added_to_all(out: torch.Tensor) -> Result:
    """Results are added to all rows of ``out`` fp32 [n, hidden]."""

    def add(first: int, end: int, start: int, stop: int, result: torch.Tensor) -> None:
        out[first:end, start:stop].add_(result.t())

    return add


def added_to_rows(out: torch.Tensor, tokens: torch.Tensor, rows: int, workspace: Workspace) -> Result:
    """Results of ``rows`` rows are added to the rows ``tokens`` int64 [<= rows] of ``out`` fp32 [T, hidden]; what is
    behind them is padding."""
    turned = torch.empty(0)

    def add(first: int, end: int, start: int, stop: int, result: torch.Tensor) -> None:
        nonlocal turned
        # Turned first: a token's features lie together in ``out``, and few tokens of a large batch in caches.
        if not len(turned):
            turned = workspace.take(min(SPAN_ROWS, rows) * (stop - start))  # no later stage has more features
        mine = tokens[first:end]
        part = turned[: len(mine) * (stop - start)].view(len(mine), stop - start)
        out[:, start:stop].index_add_(0, mine, part.copy_(result[:, : len(mine)].t()))

    return add


def kept_in(rows: torch.Tensor) -> Result:
    """Results are written over ``rows`` fp32 [n, hidden]."""

    def keep(first: int, end: int, start: int, stop: int, result: torch.Tensor) -> None:
        rows[first:end, start:stop].copy_(result.t())

    return keep
