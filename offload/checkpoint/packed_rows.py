"""Where in its parts a tile's rows lie, for kernels that dequantise them as they are.

Kernels want rows of one encoding at a fixed stride, with scales in an array of their own (kernels/experts/weights.py).
Most of the checkpoints' matrices are just that, in one piece or a few. Those that are not (stored transposed,
permuted, or in an encoding that no kernel decodes) give None, and are widened by their own ``decode`` first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from batchgen_lite.kernels.experts.weights import ENCODINGS, SCALE_BYTES, Scales
from batchgen_lite.offload.checkpoint.combined import ConcatMatrix, InterleavedPair, PairMatrix, SplitPair
from batchgen_lite.offload.checkpoint.companions import EXPONENT_SCALES
from batchgen_lite.offload.checkpoint.fp8_matrix import Fp8BlockMatrix
from batchgen_lite.offload.checkpoint.matrix import Matrix
from batchgen_lite.offload.checkpoint.mxfp4_matrix import Mxfp4Matrix
from batchgen_lite.offload.checkpoint.packed_int_matrix import Int8Matrix, PackedIntMatrix
from batchgen_lite.offload.checkpoint.stored import TensorMatrix

Span = tuple[int, int]
Place = tuple[int, int]
"""(part number, byte offset within the part)."""

NO_SCALES = Scales()
_SCALE_KINDS = {"F32": "fp32", "F16": "fp16", "BF16": "bf16"}


@dataclass(frozen=True, slots=True)
class PackedRows:
    """``rows`` stored rows of ``cols`` columns, the outputs from ``first`` (counted from the span's) on. ``scale``:
    where their scales begin, None where the encoding holds its own; strides in bytes, of scales 0 where dense."""

    first: int
    rows: int
    cols: int
    encoding: str
    data: Place
    row_stride: int
    scales: Scales = NO_SCALES
    scale: Place | None = None
    scale_stride: int = 0

    def shifted(self, parts: int, first: int) -> PackedRows:
        """The same rows where the parts are ``parts`` further on, and the outputs ``first``."""
        scale = None if self.scale is None else (self.scale[0] + parts, self.scale[1])
        return replace(self, first=self.first + first, data=(self.data[0] + parts, self.data[1]), scale=scale)

    def like(self, other: PackedRows) -> bool:
        """Whether one kernel call can read both: all but the places agree."""
        return replace(self, data=(0, 0), scale=None) == replace(other, data=(0, 0), scale=None)


def packed_rows(matrix: Matrix, span: Span) -> list[PackedRows] | None:
    """The pieces of rows ``span`` of a matrix that is no pair, in row order; None where kernels cannot read them."""
    if isinstance(matrix, TensorMatrix):
        return _plain(matrix, span)
    if isinstance(matrix, ConcatMatrix):
        return _stacked(matrix, span)
    if isinstance(matrix, Fp8BlockMatrix):
        return _fp8(matrix, span)
    rows = span[1] - span[0]
    if isinstance(matrix, Mxfp4Matrix):
        data = matrix.cols // 2
        return [PackedRows(0, rows, matrix.cols, "MXFP4_BLOCKS", (0, 0), data, Scales("e8m0", 32), (1, 0))]
    if isinstance(matrix, Int8Matrix):
        kind = _SCALE_KINDS[matrix.scale.encoding]
        return [PackedRows(0, rows, matrix.cols, "INT8", (0, 0), matrix.cols, Scales(kind, 0), (1, 0))]
    if isinstance(matrix, PackedIntMatrix):
        return _int4(matrix, rows)
    return None


def packed_pair(matrix: Matrix, span: Span) -> tuple[list[PackedRows], list[PackedRows]] | None:
    """Gate rows and up rows of a pair, piece by piece alike; None where kernels cannot read them."""
    found: tuple[list[PackedRows] | None, list[PackedRows] | None] = (None, None)
    if isinstance(matrix, PairMatrix):
        parts = len(matrix._gate.extents(*span))
        found = packed_rows(matrix._gate, span), _moved(packed_rows(matrix._up, span), parts)
    elif isinstance(matrix, SplitPair) and not matrix._whole:
        parts = len(matrix._fused.extents(*span))
        upper = span[0] + matrix.rows, span[1] + matrix.rows
        found = packed_rows(matrix._fused, span), _moved(packed_rows(matrix._fused, upper), parts)
    elif isinstance(matrix, InterleavedPair):
        found = _interleaved(packed_rows(matrix._fused, (2 * span[0], 2 * span[1])))
    gate, up = found
    if gate is None or up is None or len(gate) != len(up):
        return None
    return (gate, up) if all(a.like(b) for a, b in zip(gate, up, strict=True)) else None


def _plain(matrix: TensorMatrix, span: Span) -> list[PackedRows] | None:
    scheme = ENCODINGS.get(matrix.encoding)
    if scheme is None or scheme.companions:
        return None
    return [PackedRows(0, span[1] - span[0], matrix.cols, matrix.encoding, (0, 0), matrix.row_nbytes)]


def _stacked(matrix: ConcatMatrix, span: Span) -> list[PackedRows] | None:
    pieces: list[PackedRows] = []
    parts = 0
    for number, low, high in matrix._overlaps(*span):
        part = matrix._parts[number]
        inner = packed_rows(part, (low, high))
        if inner is None:
            return None
        pieces += [piece.shifted(parts, matrix._starts[number] + low - span[0]) for piece in inner]
        parts += len(part.extents(low, high))
    return pieces


def _fp8(matrix: Fp8BlockMatrix, span: Span) -> list[PackedRows] | None:
    """Cut where a block of rows begins, so that the kernel counts blocks from the first row it is given."""
    height, width = matrix.block
    if matrix.scale.encoding in EXPONENT_SCALES:
        return None
    group = 0 if width >= matrix.cols else width
    if group and (group < 16 or group & (group - 1)):
        return None
    kind = _SCALE_KINDS[matrix.scale.encoding]
    per_block = matrix.grid[1] * SCALE_BYTES[kind]
    edge = min(span[1], -(-span[0] // height) * height)
    pieces = []
    for start, stop in ((span[0], edge), (edge, span[1])):
        if start < stop:
            skipped = start // height - span[0] // height
            pieces.append(
                PackedRows(
                    start - span[0],
                    stop - start,
                    matrix.cols,
                    "F8_E4M3",
                    (0, (start - span[0]) * matrix.cols),
                    matrix.cols,
                    Scales(kind, group, height),
                    (1, skipped * per_block),
                )
            )
    return pieces


def _int4(matrix: PackedIntMatrix, rows: int) -> list[PackedRows] | None:
    """Symmetric int4 only: zero points are packed along the rows, and the kernels' int8 is signed."""
    if matrix.bits != 4 or matrix.zero_point is not None or matrix.group < 16 or matrix.group & (matrix.group - 1):
        return None
    scales = Scales(_SCALE_KINDS[matrix.scale.encoding], matrix.group)
    return [PackedRows(0, rows, matrix.cols, "INT4", (0, 0), matrix.cols // 2, scales, (1, 0))]


def _moved(pieces: list[PackedRows] | None, parts: int) -> list[PackedRows] | None:
    return None if pieces is None else [piece.shifted(parts, 0) for piece in pieces]


def _interleaved(pieces: Sequence[PackedRows] | None) -> tuple[list[PackedRows] | None, list[PackedRows] | None]:
    """Every second row from the first and from the second on, of rows that lie in one piece."""
    if pieces is None or len(pieces) != 1 or pieces[0].scales.rows != 1:
        return None, None
    whole = pieces[0]
    step = 0
    if whole.scale is not None:
        step = whole.scale_stride or whole.scales.per_row(whole.cols) * SCALE_BYTES[whole.scales.kind]
    halves = []
    for half in (0, 1):
        scale = None if whole.scale is None else (whole.scale[0], whole.scale[1] + half * step)
        data = whole.data[0], whole.data[1] + half * whole.row_stride
        halves.append(
            replace(
                whole,
                rows=whole.rows // 2,
                data=data,
                row_stride=2 * whole.row_stride,
                scale=scale,
                scale_stride=2 * step,
            )
        )
    return [halves[0]], [halves[1]]
