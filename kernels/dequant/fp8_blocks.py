"""FP8 weights with one scale per block of rows and columns (DeepSeek, Qwen-FP8), per row, or per tensor."""

from __future__ import annotations

import torch

from batchgen_lite.kernels.dequant.rows import decode_rows
from batchgen_lite.kernels.dequant.scratch import pieces


def decode_fp8_blocks(
    packed: torch.Tensor, scales: torch.Tensor, first_row: int, block: tuple[int, int], out: torch.Tensor
) -> None:
    """E4M3 value * scale, as fp32.

    ``packed`` uint8 [n, cols], any row stride; ``out`` fp32 [n, cols], contiguous. ``scales`` fp32 [*, blocks over
    cols]: row 0 belongs to the block of rows that ``first_row`` of the matrix, the first one here, lies in.
    ``block``: rows and columns per scale; the last block of either may be cut short.
    """
    rows, cols = out.shape
    offset = first_row % block[0]
    for at in pieces(rows, cols):
        decode_rows("F8_E4M3", packed[at], out[at])
        numbers = torch.arange(at.start + offset, at.stop + offset) // block[0]
        row_scales = scales[numbers]  # [n, blocks over cols]
        whole = cols // block[1]
        if whole * block[1] == cols:
            out[at].view(-1, block[1]).mul_(row_scales.view(-1, 1))
            continue
        out[at, : whole * block[1]].view(len(row_scales), whole, block[1]).mul_(row_scales[:, :whole, None])
        out[at, whole * block[1] :] *= row_scales[:, whole:]
