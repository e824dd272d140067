"""Feed-forward networks on the CPU, fed with weights tile by tile, and where their results go."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from batchgen_lite.kernels.experts.reference import Stage, down, gate_up
from batchgen_lite.kernels.experts.stage_memory import StageMemory
from batchgen_lite.kernels.padding import SPAN_ROWS, spans
from batchgen_lite.models.layers import FFNBiases
from batchgen_lite.models.spec import FFNSpec
from batchgen_lite.offload.tiles import Tile
from batchgen_lite.offload.workspace import Workspace

Result = Callable[[int, int, int, torch.Tensor], None]
"""Takes a part of a result: number of the span of rows, first and end feature, fp32 [features, rows], which it may
overwrite."""


def by_spans(rows: torch.Tensor) -> list[torch.Tensor]:
    """``rows`` [n, ...], n padded, as products take them: a span of them after the other."""
    cut = spans(len(rows))
    return [rows] if len(cut) == 1 else [rows[first:end] for first, end in cut]


class FFNMemory:
    """What networks of one shape need for ``count`` rows, padded. One after the other may use it.

    ``activated`` fp32 [I, width] of each span of rows, lying together, as products want it; ``turned`` [width,
    columns] the same transposed and with what is ``behind`` it, which must be zeros; ``factor``: of the activation."""

    def __init__(self, workspace: Workspace, intermediate: int, count: int, stage_rows: int, columns: int = 0) -> None:
        """``stage_rows``: of gate and up, the most that are widened at a time; ``columns``: of a stage of the down
        matrix, 0 = I."""
        columns = columns or intermediate
        memory = workspace.take(columns * count)
        whole = [memory[columns * first : columns * end].view(columns, end - first) for first, end in spans(count)]
        self.activated = [part[:intermediate] for part in whole]
        self.turned = [part.t() for part in whole]
        self.behind = [part[intermediate:] for part in whole] if columns > intermediate else []
        self.factor = StageMemory(workspace.take(stage_rows * min(SPAN_ROWS, count)))


class CpuFFN:
    """One gated feed-forward network fed with its tiles in order, on some tokens of a batch.

    Its result is linear in what is activated, so that is what a token's weight or gate scales: it is smaller than the
    result, and the result can then be added as it is.
    """

    def __init__(
        self,
        memory: FFNMemory,
        stages: Callable[[Tile, Sequence[torch.Tensor]], Iterator[Stage]],
        spec: FFNSpec,
        biases: FFNBiases,
        x: Sequence[torch.Tensor],
        scale: torch.Tensor | None,
        result: Result,
    ) -> None:
        """``x`` fp32 [width, columns of a gate and up stage] of each span of rows; ``scale`` fp32 [rows] or
        None; ``result`` takes results as they come, the first one after ``x`` has been used."""
        self._memory, self._spec, self._biases = memory, spec, biases
        self._result, self._stages = result, stages
        self._x = x
        self._scale = None if scale is None else by_spans(scale)
        self._complete = False

    def feed(self, tile: Tile, parts: Sequence[torch.Tensor]) -> None:
        """Use one tile; gate_up tiles come before down tiles."""
        memory, stages = self._memory, self._stages(tile, parts)
        if tile.role == "gate_up":
            gate_up(stages, self._x, self._spec, self._biases.gate_up, memory.activated, memory.factor)
            return
        if not self._complete:
            self._complete = True
            for behind in memory.behind:
                behind.zero_()
            if self._scale is not None:
                for activated, scale in zip(memory.activated, self._scale, strict=True):
                    activated.mul_(scale)
        for start, stop, number, result in down(stages, memory.turned):
            if self._biases.down is not None:
                bias = self._biases.down[start:stop, None]
                result.add_(bias if self._scale is None else bias * self._scale[number])
            self._result(number, start, stop, result)


def added_to_all(out: torch.Tensor) -> Result:
    """Results are added to all rows of ``out`` fp32 [n, hidden]."""
    rows = by_spans(out)

    def add(number: int, start: int, stop: int, result: torch.Tensor) -> None:
        rows[number][:, start:stop].add_(result.t())

    return add


def added_to_rows(out: torch.Tensor, tokens: torch.Tensor, rows: int, workspace: Workspace) -> Result:
    """Results of ``rows`` rows are added to the rows ``tokens`` int64 [<= rows] of ``out`` fp32 [T, hidden]; what is
    behind them is padding."""
    turned = torch.empty(0)
    cut = [tokens[first:end] for first, end in spans(rows)]

    def add(number: int, start: int, stop: int, result: torch.Tensor) -> None:
        nonlocal turned
        # Turned first: a token's features lie together in ``out``, and few tokens of a large batch in caches.
        if not len(turned):
            turned = workspace.take(min(SPAN_ROWS, rows) * (stop - start))  # no later stage has more features
        mine = cut[number]
        part = turned[: len(mine) * (stop - start)].view(len(mine), stop - start)
        out[:, start:stop].index_add_(0, mine, part.copy_(result[:, : len(mine)].t()))

    return add


def kept_in(rows: Sequence[torch.Tensor]) -> Result:
    """Results are written over ``rows`` fp32 [width, hidden] of each span."""

    def keep(number: int, start: int, stop: int, result: torch.Tensor) -> None:
        own = rows[number]
        (own if stop - start == own.shape[1] else own[:, start:stop]).copy_(result.t())

    return keep
