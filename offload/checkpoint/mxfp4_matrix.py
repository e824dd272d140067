"""MXFP4 as gpt-oss stores it: nibble pairs and block exponents in two tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from batchgen_lite.errors import CheckpointError
from batchgen_lite.kernels.dequant.pairs import decode_mxfp4_pairs
from batchgen_lite.offload.checkpoint.companions import QuantisedMatrix, expect, row_extent
from batchgen_lite.offload.checkpoint.stored import check_range
from batchgen_lite.offload.checkpoint.tensors import Extent, TensorInfo


class Mxfp4Matrix(QuantisedMatrix):
    """``blocks`` U8 [rows, cols / 32, 16] (byte j: column 2j in the low nibble) and ``scales`` U8 [rows, cols / 32].

    One expert of gpt-oss' stacked tensors; for gate_up_proj, whose rows alternate between gate and up, put it into an
    ``InterleavedPair``. Raises CheckpointError if the shapes do not agree.
    """

    row_step = decode_step = 1
    encoding = "MXFP4_BLOCKS"

    def __init__(self, blocks: TensorInfo, scales: TensorInfo) -> None:
        if len(blocks.shape) != 3 or 0 in blocks.shape or blocks.shape[2] != 16:
            raise CheckpointError(
                f"tensor {blocks.name!r} has shape {list(blocks.shape)}; [rows, blocks, 16] was expected"
            )
        expect(blocks, ("U8",), blocks.shape)
        expect(scales, ("U8",), blocks.shape[:2])
        self.rows, self.groups = blocks.shape[:2]
        self.cols = self.groups * 32
        self.blocks, self.scales = blocks, scales

    def extents(self, start: int, stop: int) -> tuple[Extent, ...]:
        check_range(self.blocks.name, start, stop, 1, self.rows)
        return row_extent(self.blocks, start, stop), row_extent(self.scales, start, stop)

    def decode(
        self, parts: Sequence[torch.Tensor], span: tuple[int, int], rows: tuple[int, int], out: torch.Tensor
    ) -> None:
        self._decode(parts, slice(rows[0] - span[0], rows[1] - span[0]), out)

    def decode_alternate(
        self, parts: Sequence[torch.Tensor], span: tuple[int, int], rows: tuple[int, int], out: torch.Tensor
    ) -> None:
        """Widen every second one of ``rows``, beginning with the first."""
        self._decode(parts, slice(rows[0] - span[0], rows[1] - span[0], 2), out)

    def _decode(self, parts: Sequence[torch.Tensor], wanted: slice, out: torch.Tensor) -> None:
        packed, exponents = parts
        decode_mxfp4_pairs(packed.view(-1, self.cols // 2)[wanted], exponents.view(-1, self.groups)[wanted], out)
