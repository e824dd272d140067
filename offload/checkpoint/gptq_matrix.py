"""GPTQ int4: eight input channels of one output in an int32; stored [inputs, outputs], so read whole."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from batchgen_lite.errors import CheckpointError
from batchgen_lite.kernels.dequant.pairs import decode_grouped_int4, look_up_pairs
from batchgen_lite.kernels.dequant.scratch import pieces
from batchgen_lite.offload.checkpoint.companions import FLOAT_SCALES, QuantisedMatrix, expect, typed, widen_scales
from batchgen_lite.offload.checkpoint.stored import check_range
from batchgen_lite.offload.checkpoint.tensors import Extent, TensorInfo

_NIBBLES = tuple(float(q) for q in range(16))


class GptqMatrix(QuantisedMatrix):
    """scale * (q - zero). ``qweight`` I32 [cols / 8, rows], nibble k of word r being column 8 r + k; ``qzeros`` I32
    [groups, rows / 8], nibble k of word c being row 8 c + k; ``scales`` [groups, rows]; ``g_idx`` I32 [cols], each
    column's group, or None where column c belongs to group c // ``group``.

    ``zero_offset``: what is added to the stored zeros, 1 for the format "gptq", 0 for "gptq_v2". Raises CheckpointError
    if the shapes do not agree, and from ``decode`` for a ``g_idx`` beyond the groups.
    """

    decode_step = 1
    encoding = "GPTQ_INT4"

    def __init__(
        self,
        qweight: TensorInfo,
        qzeros: TensorInfo,
        scales: TensorInfo,
        g_idx: TensorInfo | None,
        group: int,
        zero_offset: int,
    ) -> None:
        if len(qweight.shape) != 2 or 0 in qweight.shape or qweight.shape[1] % 8:
            raise CheckpointError(f"tensor {qweight.name!r} has shape {list(qweight.shape)}; rows must be whole words")
        self.rows, self.cols = qweight.shape[1], qweight.shape[0] * 8
        if group < 1 or self.cols % group:
            raise CheckpointError(f"tensor {qweight.name!r}: {self.cols} columns are not whole groups of {group}")
        self.row_step = self.rows
        self.group, self.groups = group, self.cols // group
        self.zero_offset = zero_offset
        expect(qweight, ("I32",), qweight.shape)
        expect(qzeros, ("I32",), (self.groups, self.rows // 8))
        expect(scales, FLOAT_SCALES, (self.groups, self.rows))
        if g_idx is not None:
            expect(g_idx, ("I32",), (self.cols,))
        self.qweight, self.qzeros, self.scales, self.g_idx = qweight, qzeros, scales, g_idx

    def extents(self, start: int, stop: int) -> tuple[Extent, ...]:
        check_range(self.qweight.name, start, stop, self.row_step, self.rows)
        tensors = (self.qweight, self.qzeros, self.scales) + (() if self.g_idx is None else (self.g_idx,))
        return tuple(tensor.extent for tensor in tensors)

    def decode(
        self, parts: Sequence[torch.Tensor], span: tuple[int, int], rows: tuple[int, int], out: torch.Tensor
    ) -> None:
        words = typed(parts[0], torch.int32).view(self.cols // 8, self.rows)
        scales, zeros = self._scales_and_zeros(parts, rows)  # [n, groups] each
        order = None if self.g_idx is None else self._order(parts[3])
        for at in pieces(rows[1] - rows[0], self.cols):
            # [cols / 8, n] -> [n, cols / 8]: bytes are then nibble pairs in column order
            band = words[:, rows[0] + at.start : rows[0] + at.stop].contiguous().t().contiguous()
            packed = band.view(torch.uint8)
            if order is None:
                decode_grouped_int4(packed, scales[at], zeros[at], out[at])
            else:
                look_up_pairs(packed, _NIBBLES, out[at])
                out[at] -= zeros[at][:, order]
                out[at] *= scales[at][:, order]

    def _scales_and_zeros(
        self, parts: Sequence[torch.Tensor], rows: tuple[int, int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        words = slice(rows[0] // 8, -(-rows[1] // 8))
        packed = parts[1].view(self.groups, -1)[:, 4 * words.start : 4 * words.stop].contiguous()
        zeros = torch.empty(self.groups, 2 * packed.shape[1])
        look_up_pairs(packed, _NIBBLES, zeros)
        zeros += self.zero_offset
        first = 8 * words.start
        zeros = zeros[:, rows[0] - first : rows[1] - first]
        scales = widen_scales(parts[2], self.scales.encoding, self.rows)[:, rows[0] : rows[1]]
        return scales.t().contiguous(), zeros.t().contiguous()

    def _order(self, part: torch.Tensor) -> torch.Tensor | None:
        """Each column's group, or None where groups simply follow each other."""
        order = typed(part, torch.int32).long()
        if torch.equal(order, torch.arange(self.cols) // self.group):
            return None
        if int(order.min()) < 0 or int(order.max()) >= self.groups:
            name = "" if self.g_idx is None else self.g_idx.name
            raise CheckpointError(
                f"tensor {name!r} names groups {int(order.min())} to {int(order.max())}, but there are {self.groups}"
            )
        return order
