"""AWQ int4 in the "gemm" layout: eight outputs of one input channel in an int32; stored [inputs, outputs]."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from batchgen_lite.errors import CheckpointError
from batchgen_lite.kernels.dequant.scratch import pieces
from batchgen_lite.offload.checkpoint.companions import FLOAT_SCALES, QuantisedMatrix, expect, typed, widen_scales
from batchgen_lite.offload.checkpoint.stored import check_range
from batchgen_lite.offload.checkpoint.tensors import Extent, TensorInfo

_OUTPUT_OF_NIBBLE = (0, 2, 4, 6, 1, 3, 5, 7)
"""Nibble i of a word holds output 8 c + this: AutoAWQ's packing order for its GEMM kernel."""

_FACTOR_OF_OUTPUT = tuple(2.0 ** (4 * _OUTPUT_OF_NIBBLE.index(output) % 28) for output in range(8))
"""What ``_unpack`` leaves output 8 c + o multiplied with."""


class AwqMatrix(QuantisedMatrix):
    """(q - zero) * scale. ``qweight`` I32 [cols, rows / 8]; ``qzeros`` I32 [groups, rows / 8], packed alike; ``scales``
    [groups, rows]; group g covers columns [g * group, (g + 1) * group). Raises CheckpointError if the shapes do not
    agree."""

    decode_step = 8
    encoding = "AWQ_INT4"

    def __init__(self, qweight: TensorInfo, qzeros: TensorInfo, scales: TensorInfo, group: int) -> None:
        if len(qweight.shape) != 2 or 0 in qweight.shape:
            raise CheckpointError(f"tensor {qweight.name!r} has shape {list(qweight.shape)}; a matrix was expected")
        self.rows, self.cols = qweight.shape[1] * 8, qweight.shape[0]
        if group < 1 or self.cols % group:
            raise CheckpointError(f"tensor {qweight.name!r}: {self.cols} columns are not whole groups of {group}")
        self.row_step = self.rows
        self.group, self.groups = group, self.cols // group
        expect(qweight, ("I32",), qweight.shape)
        expect(qzeros, ("I32",), (self.groups, self.rows // 8))
        expect(scales, FLOAT_SCALES, (self.groups, self.rows))
        self.qweight, self.qzeros, self.scales = qweight, qzeros, scales

    def extents(self, start: int, stop: int) -> tuple[Extent, ...]:
        check_range(self.qweight.name, start, stop, self.row_step, self.rows)
        return self.qweight.extent, self.qzeros.extent, self.scales.extent

    def decode(
        self, parts: Sequence[torch.Tensor], span: tuple[int, int], rows: tuple[int, int], out: torch.Tensor
    ) -> None:
        words = typed(parts[0], torch.int32).view(self.cols, -1)
        zero_words = typed(parts[1], torch.int32).view(self.groups, -1)
        scales = widen_scales(parts[2], self.scales.encoding, self.rows)[:, rows[0] : rows[1]].t().contiguous()
        scales.view(-1, 8, self.groups).div_(torch.tensor(_FACTOR_OF_OUTPUT).view(8, 1))
        zeros = torch.empty(rows[1] - rows[0], self.groups)
        _unpack(zero_words[:, rows[0] // 8 : rows[1] // 8], zeros)
        for at in pieces((rows[1] - rows[0]) // 8, 8 * self.cols):
            wide = slice(8 * at.start, 8 * at.stop)
            _unpack(words[:, rows[0] // 8 + at.start : rows[0] // 8 + at.stop], out[wide])
            grouped = out[wide].view(-1, self.group)
            grouped -= zeros[wide].view(-1, 1)
            grouped *= scales[wide].view(-1, 1)


def _unpack(words: torch.Tensor, out: torch.Tensor) -> None:
    """``out`` fp32 [8 w, inputs] = the nibbles of ``words`` int32 [inputs, w], transposed; each multiplied with 16 to
    the power of its place in the word, because masking alone is cheaper than masking and shifting, and exact. The
    seventh, which holds the sign bit, is shifted instead and has factor 1."""
    turned = words.contiguous().t().contiguous()  # [w, inputs]
    nibble = torch.empty_like(turned)
    outputs = out.view(turned.shape[0], 8, turned.shape[1])
    for number, output in enumerate(_OUTPUT_OF_NIBBLE):
        if number < 7:
            torch.bitwise_and(turned, 15 << (4 * number), out=nibble)
        else:
            torch.bitwise_right_shift(turned, 28, out=nibble)
            nibble &= 15
        outputs[:, output].copy_(nibble)
