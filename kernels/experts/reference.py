"""A feed-forward network (expert or dense) over row tiles, in torch: the CPU's production path.

Activations stay transposed, [features, tokens], from the first GEMM to the last: ``W x^T`` is up to twice as fast as
``x W^T`` at the 16 to 112 tokens of a product, and a stage of rows is then a slab of its result. Token columns are
padded and go through in spans (kernels/padding.py), so that a column's bits do not depend on how many there are.

Weights are widened to fp32 a stage of rows at a time into a scratch that stays in cache; the stage's size depends on
the matrix alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import lcm

import torch

from batchgen_lite.kernels.experts.activation import gated
from batchgen_lite.kernels.experts.stage_memory import StageMemory
from batchgen_lite.kernels.padding import spans
from batchgen_lite.kernels.products import padded_columns, product
from batchgen_lite.models.spec import FFNSpec
from batchgen_lite.offload.checkpoint.matrix import Matrix

STAGE_ELEMENTS = 1 << 20  # weights widened at a time; a constant, see above
HALVES = frozenset({"F16", "BF16"})


def stage_rows(matrix: Matrix) -> int:
    """Rows of ``matrix`` widened at a time: about STAGE_ELEMENTS, a multiple of its decode step and of 16."""
    step = lcm(matrix.decode_step, 16)
    rows = STAGE_ELEMENTS // (matrix.cols * matrix.outputs_per_row)
    return max(step, rows // step * step)


def most_stage_rows(matrix: Matrix) -> int:
    """Rows of the largest stage of ``matrix``."""
    return min(matrix.rows, stage_rows(matrix))


def stage_columns(matrix: Matrix) -> int:
    """Columns of a stage of a routed expert's ``matrix``, see padded_columns. Only floats of 16 bits are padded: fp32
    is used where it lies, and decoders of packed formats write whole rows."""
    return padded_columns(matrix.cols) if set(matrix.encoding.split("+")) <= HALVES else matrix.cols


def stage_elements(matrix: Matrix) -> int:
    """fp32 elements of the largest stage of ``matrix``, padded or not."""
    return most_stage_rows(matrix) * stage_columns(matrix) * matrix.outputs_per_row


Stage = tuple[int, int, torch.Tensor]
"""First row, end row, and their fp32 weights [rows * outputs_per_row, cols or more]; of a pair first gate, then up."""


def stage_spans(matrix: Matrix, span: tuple[int, int]) -> Iterator[tuple[int, int]]:
    """First and end row of each stage of the tile ``span``."""
    step = stage_rows(matrix)
    for start in range(span[0], span[1], step):
        yield start, min(start + step, span[1])


def widened(
    matrix: Matrix, parts: Sequence[torch.Tensor], span: tuple[int, int], scratch: StageMemory, columns: int = 0
) -> Iterator[Stage]:
    """Each stage of the tile ``span``, one after the other.

    ``scratch`` of at least stage_elements(matrix) is overwritten by the next stage; plain fp32 needs no copy.
    ``columns``: that stages have, those behind the matrix' zeros; at most stage_columns(matrix), 0 = the matrix' own.
    """
    columns = columns or matrix.cols
    whole = matrix.view(parts, span) if matrix.outputs_per_row == 1 else None
    for start, stop in stage_spans(matrix, span):
        if whole is not None:
            yield start, stop, whole[start - span[0] : stop - span[0]]
            continue
        weights, own, behind = scratch.padded((stop - start) * matrix.outputs_per_row, matrix.cols, columns)
        matrix.decode(parts, span, (start, stop), own)
        if columns > matrix.cols:
            behind.zero_()  # each time: other matrices have lain here since
        yield start, stop, weights


def linear(stages: Iterable[Stage], x: torch.Tensor, out: torch.Tensor) -> None:
    """``out[span] = W[span] x^T``. ``x`` fp32 [T, cols], ``out`` fp32 [rows, T] (the whole matrix' rows), T padded."""
    columns = spans(x.shape[0])
    for start, stop, weights in stages:
        for first, end in columns:
            out[start:stop, first:end].copy_(product(weights, x[first:end]))


def gate_up(
    stages: Iterable[Stage],
    x: Sequence[torch.Tensor],
    spec: FFNSpec,
    bias: torch.Tensor | None,
    out: Sequence[torch.Tensor],
    scratch: StageMemory,
) -> None:
    """``out[span] = act(gate x^T + b) * (up x^T + b)``.

    ``x`` fp32 [width, columns of a stage] of each span, padded; ``bias`` fp32 [2 * I] gate first, or
    None; ``out`` fp32 [I, width] of each; ``scratch`` of at least stage rows * width elements.
    """
    for start, stop, weights in stages:
        rows = stop - start
        for own, activated in zip(x, out, strict=True):
            gate, up = product(weights, own).view(2, rows, len(own))
            if bias is not None:
                half = len(bias) // 2
                gate.add_(bias[start:stop, None])
                up.add_(bias[half + start : half + stop, None])
            into = activated if rows == len(activated) else activated[start:stop]
            gated(gate, up, spec, scratch.matrix(rows, len(own)), into)


def down(stages: Iterable[Stage], activated: Sequence[torch.Tensor]) -> Iterator[tuple[int, int, int, torch.Tensor]]:
    """``W[span] activated^T``, a span of rows after the other: first and end row, number of the span, and the result
    fp32 [rows, width], a new tensor. ``activated`` fp32 [width, I] of each span, as ``gate_up`` gave it, transposed."""
    for start, stop, weights in stages:
        for number, rows in enumerate(activated):
            yield start, stop, number, product(weights, rows)
