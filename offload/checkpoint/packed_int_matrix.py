"""Integer weights packed along the columns, with scales per group (compressed-tensors)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from batchgen_lite.errors import CheckpointError
from batchgen_lite.kernels.dequant.pairs import decode_grouped_int4, decode_grouped_int8
from batchgen_lite.offload.checkpoint.companions import (
    FLOAT_SCALES,
    QuantisedMatrix,
    expect,
    row_extent,
    typed,
    widen_scales,
)
from batchgen_lite.offload.checkpoint.stored import check_range
from batchgen_lite.offload.checkpoint.tensors import Extent, TensorInfo


class PackedIntMatrix(QuantisedMatrix):
    """compressed-tensors' "pack-quantized": ``packed`` I32 [rows, cols * bits / 32], the first column in the lowest
    bits, values offset by 2^(bits - 1); ``scale`` [rows, groups].

    ``zero_point``: None (symmetric) or I32 [rows * bits / 32, groups], packed along the rows with the same offset.
    Raises CheckpointError if the shapes do not agree.
    """

    def __init__(
        self, packed: TensorInfo, scale: TensorInfo, zero_point: TensorInfo | None, cols: int, group: int, bits: int
    ) -> None:
        if bits not in (4, 8):
            raise ValueError(f"{bits} bits")
        per_word = 32 // bits
        if len(packed.shape) != 2 or cols < 1 or cols % per_word or group < 1 or cols % group:
            raise CheckpointError(
                f"tensor {packed.name!r} {list(packed.shape)} of {bits}-bit values: {cols} columns are not whole words "
                f"of {per_word} and whole groups of {group}"
            )
        self.rows, self.cols, self.group, self.bits = packed.shape[0], cols, group, bits
        self.groups = cols // group
        expect(packed, ("I32",), (self.rows, cols // per_word))
        expect(scale, FLOAT_SCALES, (self.rows, self.groups))
        if zero_point is not None:
            expect(zero_point, ("I32",), (-(-self.rows // per_word), self.groups))
        self.packed, self.scale, self.zero_point = packed, scale, zero_point
        self.row_step = self.decode_step = 1
        self._per_word = per_word
        self.encoding = f"INT{bits}"

    def extents(self, start: int, stop: int) -> tuple[Extent, ...]:
        check_range(self.packed.name, start, stop, 1, self.rows)
        found = (row_extent(self.packed, start, stop), row_extent(self.scale, start, stop))
        if self.zero_point is None:
            return found
        return (*found, row_extent(self.zero_point, start // self._per_word, (stop - 1) // self._per_word + 1))

    def decode(
        self, parts: Sequence[torch.Tensor], span: tuple[int, int], rows: tuple[int, int], out: torch.Tensor
    ) -> None:
        wanted = slice(rows[0] - span[0], rows[1] - span[0])
        packed = parts[0].view(span[1] - span[0], -1)[wanted]
        scales = widen_scales(parts[1], self.scale.encoding, self.groups)[wanted]
        zeros = None if self.zero_point is None else self._zeros(parts[2], span[0] // self._per_word, rows)
        decoder = decode_grouped_int4 if self.bits == 4 else decode_grouped_int8
        decoder(packed, scales, zeros, out)

    def _zeros(self, part: torch.Tensor, first_word: int, rows: tuple[int, int]) -> torch.Tensor:
        """Zero points in the offset representation, as the values themselves: fp32 [n, groups]."""
        words = typed(part, torch.int32).view(-1, 1, self.groups)
        shifts = torch.arange(0, 32, self.bits, dtype=torch.int32).view(1, -1, 1)
        values = ((words >> shifts) & ((1 << self.bits) - 1)).view(-1, self.groups)
        first = first_word * self._per_word
        return values[rows[0] - first : rows[1] - first].float()


class Int8Matrix(QuantisedMatrix):
    """compressed-tensors' "int-quantized": ``weight`` I8 [rows, cols] times ``scale``, one per row."""

    row_step = decode_step = 1
    encoding = "INT8"

    def __init__(self, weight: TensorInfo, scale: TensorInfo) -> None:
        if len(weight.shape) != 2 or 0 in weight.shape:
            raise CheckpointError(f"tensor {weight.name!r} has shape {list(weight.shape)}; a matrix was expected")
        expect(weight, ("I8",), weight.shape)
        self.rows, self.cols = weight.shape
        expect(scale, FLOAT_SCALES, (self.rows, 1))
        self.weight, self.scale = weight, scale

    def extents(self, start: int, stop: int) -> tuple[Extent, ...]:
        check_range(self.weight.name, start, stop, 1, self.rows)
        return row_extent(self.weight, start, stop), row_extent(self.scale, start, stop)

    def decode(
        self, parts: Sequence[torch.Tensor], span: tuple[int, int], rows: tuple[int, int], out: torch.Tensor
    ) -> None:
        wanted = slice(rows[0] - span[0], rows[1] - span[0])
        out.copy_(parts[0].view(torch.int8).view(-1, self.cols)[wanted])
        out *= widen_scales(parts[1], self.scale.encoding, 1)[wanted]
