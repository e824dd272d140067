"""A feed-forward network (expert or dense) over row tiles, in torch: the CPU's production path.

Activations stay transposed, [features, tokens], from the first GEMM to the last: ``mm(W, x.T)`` is up to twice as
fast as ``x @ W.T`` at the 16 to 128 tokens an expert sees, and a stage of rows is then a contiguous slab of its result.
Token columns are padded to a multiple of 16, so that a column's bits do not depend on how many columns there are.

Weights are widened to fp32 a stage of rows at a time into a scratch that stays in cache; the stage's size depends on
the matrix alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import lcm

import torch

from batchgen_lite.kernels.experts.activation import gated
from batchgen_lite.models.spec import FFNSpec
from batchgen_lite.offload.checkpoint.matrix import Matrix

STAGE_ELEMENTS = 1 << 20  # weights widened at a time; a constant, see above
STAGE_TENSORS = 3  # of a stage of gate/up rows: gate, up, and what the activation needs


def stage_rows(matrix: Matrix) -> int:
    """Rows of ``matrix`` widened at a time: about STAGE_ELEMENTS, a multiple of its decode step and of 16."""
    step = lcm(matrix.decode_step, 16)
    rows = STAGE_ELEMENTS // (matrix.cols * matrix.outputs_per_row)
    return max(step, rows // step * step)


def stage_elements(matrix: Matrix) -> int:
    """fp32 elements of the largest stage of ``matrix``."""
    return min(matrix.rows, stage_rows(matrix)) * matrix.cols * matrix.outputs_per_row


Stage = tuple[int, int, torch.Tensor]
"""First row, end row, and their fp32 weights [rows * outputs_per_row, cols]; of a pair first gate, then up."""


def widened(
    matrix: Matrix, parts: Sequence[torch.Tensor], span: tuple[int, int], scratch: torch.Tensor
) -> Iterator[Stage]:
    """Each stage of the tile ``span``, one after the other.

    ``scratch`` fp32 [>= stage_elements(matrix)] is overwritten by the next stage; plain fp32 needs no copy.
    """
    whole = matrix.view(parts, span) if matrix.outputs_per_row == 1 else None
    step = stage_rows(matrix)
    for start in range(span[0], span[1], step):
        stop = min(start + step, span[1])
        if whole is not None:
            yield start, stop, whole[start - span[0] : stop - span[0]]
            continue
        rows = (stop - start) * matrix.outputs_per_row
        weights = scratch[: rows * matrix.cols].view(rows, matrix.cols)
        matrix.decode(parts, span, (start, stop), weights)
        yield start, stop, weights


def linear(stages: Iterable[Stage], x: torch.Tensor, out: torch.Tensor) -> None:
    """``out[span] = W[span] x^T``. ``x`` fp32 [T, cols], ``out`` fp32 [rows, T] (the whole matrix' rows), T padded."""
    columns = x.t()
    for start, stop, weights in stages:
        torch.mm(weights, columns, out=out[start:stop])


def gate_up(
    stages: Iterable[Stage],
    x: torch.Tensor,
    spec: FFNSpec,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    scratch: torch.Tensor,
) -> None:
    """``out[span] = act(gate x^T + b) * (up x^T + b)``.

    ``x`` fp32 [n, hidden]; ``bias`` fp32 [2 * I] gate first, or None; ``out`` fp32 [I, n]; ``scratch`` fp32 of at
    least STAGE_TENSORS * stage rows * n elements.
    """
    columns, tokens = x.t(), x.shape[0]
    for start, stop, weights in stages:
        rows = stop - start
        gate, up, factor = scratch[: STAGE_TENSORS * rows * tokens].view(STAGE_TENSORS, rows, tokens)
        torch.mm(weights, columns, out=scratch[: 2 * rows * tokens].view(2 * rows, tokens))
        if bias is not None:
            half = len(bias) // 2
            gate.add_(bias[start:stop, None])
            up.add_(bias[half + start : half + stop, None])
        gated(gate, up, spec, factor, out[start:stop])


def down(stages: Iterable[Stage], activated: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
    """``out[span] = W[span] activated (+ b)``. ``activated`` fp32 [I, n], ``out`` fp32 [hidden, n]; ``bias`` fp32
    [hidden, 1] or [hidden, n]."""
    for start, stop, weights in stages:
        torch.mm(weights, activated, out=out[start:stop])
        if bias is not None:
            out[start:stop].add_(bias[start:stop])
