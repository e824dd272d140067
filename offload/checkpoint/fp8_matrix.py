"""FP8 (E4M3) weights with a grid of scales beside them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from batchgen_lite.errors import CheckpointError
from batchgen_lite.kernels.dequant.fp8_blocks import decode_fp8_blocks
from batchgen_lite.offload.checkpoint.companions import (
    EXPONENT_SCALES,
    FLOAT_SCALES,
    QuantisedMatrix,
    expect,
    row_extent,
    widen_scales,
)
from batchgen_lite.offload.checkpoint.stored import check_range
from batchgen_lite.offload.checkpoint.tensors import Extent, TensorInfo


class Fp8BlockMatrix(QuantisedMatrix):
    """``weight`` F8_E4M3 [rows, cols] times ``scale`` [ceil(rows / block[0]), ceil(cols / block[1])].

    ``block``: rows and columns per scale, as the model's configuration states them; (1, cols) is a scale per row,
    (rows, cols) one for the whole tensor. Scales are floats, or bare exponents (E8M0). Raises CheckpointError if the
    shapes do not agree.
    """

    row_step = decode_step = 1
    encoding = "F8_E4M3"

    def __init__(self, weight: TensorInfo, scale: TensorInfo, block: tuple[int, int]) -> None:
        if len(weight.shape) != 2 or 0 in weight.shape or min(block) < 1:
            raise CheckpointError(f"tensor {weight.name!r} has shape {list(weight.shape)}; a matrix was expected")
        expect(weight, ("F8_E4M3",), weight.shape)
        self.rows, self.cols = weight.shape
        self.block = block
        self.grid = (-(-self.rows // block[0]), -(-self.cols // block[1]))
        if self.grid == (1, 1) and scale.shape in ((), (1,)):  # one scale, stored as a scalar or a vector
            scale = TensorInfo(scale.name, scale.encoding, (1, 1), scale.extent)
        if scale.shape == self.grid[:1] and self.grid[1] == 1:  # one scale a row, stored as a vector
            scale = TensorInfo(scale.name, scale.encoding, self.grid, scale.extent)
        expect(scale, FLOAT_SCALES + EXPONENT_SCALES, self.grid)
        self.weight, self.scale = weight, scale

    def extents(self, start: int, stop: int) -> tuple[Extent, ...]:
        check_range(self.weight.name, start, stop, 1, self.rows)
        first, last = start // self.block[0], (stop - 1) // self.block[0] + 1
        return row_extent(self.weight, start, stop), row_extent(self.scale, first, last)

    def decode(
        self, parts: Sequence[torch.Tensor], span: tuple[int, int], rows: tuple[int, int], out: torch.Tensor
    ) -> None:
        data, grid = parts
        packed = data.view(-1, self.cols)[rows[0] - span[0] : rows[1] - span[0]]
        scales = widen_scales(grid, self.scale.encoding, self.grid[1])
        skipped = rows[0] // self.block[0] - span[0] // self.block[0]
        decode_fp8_blocks(packed, scales[skipped:], rows[0], self.block, out)
