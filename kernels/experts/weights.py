"""Weights of several experts in a byte arena, as the kernels read them: where each lies and how it is stored.

An arena is a ring or a resident area on the device: one uint8 tensor in which the streaming side places rows of
matrices wherever there is room. A ``WeightTable`` says, for every expert of a layer, at which byte the matrix (or the
row tile of it that is in memory) begins. Only offsets change as slots are reused, so tables are cheap to make.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from batchgen_lite.errors import UnsupportedError
from batchgen_lite.kernels.launch import OperandError, ceil_div, upload


@dataclass(frozen=True, slots=True)
class Encoding:
    """How a kernel walks a storage format. ``block``: columns that are stored together, in ``block_bytes``; ``step``:
    K must be a multiple of it; ``parts``: slices per tile (kernels/dequant/tile.py); ``min_block_k``: the smallest
    tile width; ``alignment``: of every offset, in bytes; ``companions``: scales lie outside the blocks."""

    block: int
    block_bytes: int
    parts: int = 1
    min_block_k: int = 16
    alignment: int = 1
    companions: bool = False


ENCODINGS: Mapping[str, Encoding] = {
    "F32": Encoding(1, 4, alignment=4),
    "F16": Encoding(1, 2, alignment=2),
    "BF16": Encoding(1, 2, alignment=2),
    "INT8": Encoding(1, 1, companions=True),
    "INT4": Encoding(2, 1, parts=2, min_block_k=32, companions=True),
    "F8_E4M3": Encoding(1, 1, companions=True),
    "MXFP4_BLOCKS": Encoding(32, 16, parts=2, min_block_k=32, companions=True),
    "MXFP4": Encoding(32, 17, parts=2, min_block_k=32),
    "Q8_0": Encoding(32, 34, min_block_k=32, alignment=2),
    "Q4_0": Encoding(32, 18, parts=2, min_block_k=32, alignment=2),
    "Q4_K": Encoding(256, 144, parts=2, min_block_k=64, alignment=2),
    "Q6_K": Encoding(256, 210, parts=4, min_block_k=128, alignment=2),
}

SCALE_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2, "e8m0": 1}


def encoding_of(name: str) -> Encoding:
    """Raises UnsupportedError, naming what is supported, for a format that the kernels do not decode."""
    if name not in ENCODINGS:
        raise UnsupportedError(
            f"no kernel decodes weights stored as {name}; the kernels take {', '.join(ENCODINGS)}. "
            "Widen them to bf16 on the host, or use the torch path"
        )
    return ENCODINGS[name]


@dataclass(frozen=True, slots=True)
class Scales:
    """Companions of a matrix. ``kind``: a key of SCALE_BYTES; ``group``: columns per scale, 0 = one scale a row;
    ``rows``: rows per scale (128 for DeepSeek's fp8 blocks); ``zeros``: INT4 zero points, one byte a group, follow
    the same [rows, groups] order, else 8 is the zero."""

    kind: str = "fp32"
    group: int = 0
    rows: int = 1
    zeros: bool = False

    def per_row(self, cols: int) -> int:
        return 1 if self.group == 0 else ceil_div(cols, self.group)


NO_SCALES = Scales()


@dataclass(frozen=True, slots=True)
class WeightTable:
    """Matrices [rows, cols] of E experts in ``arena``. ``table`` int64 [E, 3]: byte offsets of data, scales and zero
    points of each expert (0 where it has none, or is not in memory). ``row_stride``: bytes from row to row (twice a
    row's bytes where gate and up rows alternate). ``alignment``: the largest power of two up to 16 that divides every
    data offset and the row stride; the kernels load as wide as it allows. ``scale_row_stride``: bytes from a row's
    scales to the next row's, 0 = densely stored."""

    arena: torch.Tensor
    encoding: str
    rows: int
    cols: int
    table: torch.Tensor
    row_stride: int
    alignment: int
    scales: Scales = NO_SCALES
    scale_row_stride: int = 0

    @property
    def experts(self) -> int:
        return int(self.table.shape[0])

    @property
    def scale_stride(self) -> int:
        return self.scale_row_stride or self.scales.per_row(self.cols) * SCALE_BYTES[self.scales.kind]

    def with_table(self, table: torch.Tensor) -> WeightTable:
        """The same matrices, their offsets in ``table``."""
        return WeightTable(
            self.arena, self.encoding, self.rows, self.cols, table, self.row_stride, self.alignment, self.scales,
            self.scale_row_stride,
        )  # fmt: skip

    def nbytes(self) -> int:
        """Bytes that one expert's matrix takes: what a kernel must read at least once."""
        scheme = ENCODINGS[self.encoding]
        data = self.rows * (self.cols // scheme.block) * scheme.block_bytes
        if not scheme.companions:
            return data
        groups = ceil_div(self.rows, self.scales.rows) * self.scales.per_row(self.cols)
        return data + groups * (SCALE_BYTES[self.scales.kind] + int(self.scales.zeros))


def host_table(
    arena: torch.Tensor,
    encoding: str,
    rows: int,
    cols: int,
    experts: int,
    places: Mapping[int, Sequence[int]],
    *,
    scales: Scales = NO_SCALES,
    row_stride: int | None = None,
    scale_row_stride: int = 0,
) -> WeightTable:
    """Describe matrices of some of ``experts`` whose byte offsets in ``arena`` are known on the host: ``places`` gives
    (data, scales, zero points) by expert number, as far as the format has them.

    An expert without a place must not be named in a launch. ``row_stride`` and ``scale_row_stride`` default to densely
    stored rows. The table stays on the host: put its upload (``upload_together``) in its place before a launch.
    Raises OperandError for ranges outside the arena or misaligned offsets, UnsupportedError for unknown formats or
    columns that are no multiple of the format's block.
    """
    scheme = encoding_of(encoding)
    _check_arena(arena)
    if cols % scheme.block:
        raise UnsupportedError(f"{encoding} weights with {cols} columns: a multiple of {scheme.block} is required")
    row_bytes = cols // scheme.block * scheme.block_bytes
    stride = row_bytes if row_stride is None else row_stride
    extents = [("data", (rows - 1) * stride + row_bytes, scheme.alignment)]
    if scheme.companions:
        size = SCALE_BYTES[scales.kind]
        groups = ceil_div(rows, scales.rows) * scales.per_row(cols)
        extent = (rows - 1) * scale_row_stride + scales.per_row(cols) * size if scale_row_stride else groups * size
        extents += [("scales", extent, size), ("zero points", groups, 1)]
    table = np.zeros((experts, 3), dtype=np.int64)  # few entries of many: lists would cost more than the launch
    common = math.gcd(16, arena.data_ptr() if arena.device.type != "meta" else 16, stride)
    for expert, place in places.items():
        for (what, nbytes, alignment), offset in zip(extents, place, strict=False):
            _check_range(arena, what, offset, nbytes, alignment)
        table[expert, : len(place)] = place
        common = math.gcd(common, place[0])
    return WeightTable(arena, encoding, rows, cols, torch.from_numpy(table), stride, common, scales, scale_row_stride)


def weight_table(
    arena: torch.Tensor,
    encoding: str,
    rows: int,
    cols: int,
    data: Sequence[int],
    *,
    scales: Scales = NO_SCALES,
    scale_offsets: Sequence[int] | None = None,
    zero_offsets: Sequence[int] | None = None,
    row_stride: int | None = None,
    scale_row_stride: int = 0,
) -> WeightTable:
    """As ``host_table``, uploaded, for offsets in lists, one per expert; -1 = not in memory. Raises what it raises, and
    OperandError where a format's companions are missing."""
    scheme = encoding_of(encoding)
    if cols % scheme.block == 0:
        _check_scales(encoding, scheme, cols, scales, scale_offsets, zero_offsets)
    lists = [data, *(offsets for offsets in (scale_offsets, zero_offsets) if offsets is not None and scheme.companions)]
    places = {
        expert: [max(offset, 0) for offset in place]
        for expert, place in enumerate(zip(*lists, strict=True))
        if place[0] >= 0
    }
    table = host_table(
        arena, encoding, rows, cols, len(data), places,
        scales=scales, row_stride=row_stride, scale_row_stride=scale_row_stride,
    )  # fmt: skip
    return table.with_table(upload(table.table, arena.device))


def _check_arena(arena: torch.Tensor) -> None:
    if arena.dtype != torch.uint8 or arena.dim() != 1 or not arena.is_contiguous():
        raise OperandError(f"arena: {arena.dtype} {list(arena.shape)}, but a flat contiguous uint8 tensor is required")


def _check_range(arena: torch.Tensor, what: str, offset: int, nbytes: int, alignment: int) -> None:
    if offset + nbytes > arena.numel():
        raise OperandError(
            f"{what} at [{offset}, {offset + nbytes}) end behind the arena's {arena.numel()} bytes; take a larger slot"
        )
    if offset % alignment:
        raise OperandError(f"{what} at byte {offset}: this format needs a multiple of {alignment}; place it so")


def _check_scales(
    encoding: str,
    scheme: Encoding,
    cols: int,
    scales: Scales,
    scale_offsets: Sequence[int] | None,
    zero_offsets: Sequence[int] | None,
) -> None:
    if not scheme.companions:
        return
    if scale_offsets is None:
        raise OperandError(f"{encoding} weights need scale_offsets, one per expert")
    if scales.kind not in SCALE_BYTES:
        raise UnsupportedError(f"scales of kind {scales.kind!r}: the kernels take {', '.join(SCALE_BYTES)}")
    if (encoding == "MXFP4_BLOCKS") != (scales.kind == "e8m0"):
        raise UnsupportedError(
            f"{encoding} weights with {scales.kind} scales: e8m0 belongs to MXFP4_BLOCKS, and only there"
        )
    group = scales.group
    if group != 0 and (group < 16 or group & (group - 1) or (encoding == "INT4" and cols % group)):
        raise UnsupportedError(
            f"{encoding} scales over groups of {group} in {cols} columns: a power of two from 16 on is required"
        )
    if scales.zeros and (encoding != "INT4" or zero_offsets is None):
        raise OperandError("zero points are for INT4, and need zero_offsets, one per expert")
