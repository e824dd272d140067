"""Blocks that ``pack`` writes where GGUF has no such type: groups of 64, and bytes with a minimum.

Layouts follow GGUF's, so that everything said in ``blocks32`` holds: an fp16 scale, an fp16 minimum where the name has
an M, then the codes; of 4-bit codes the low nibbles are the first half of the group and the high ones the second.
"""

from __future__ import annotations

import torch

from batchgen_lite.kernels.dequant.blocks32 import half_column, nibbles, widen_bytes
from batchgen_lite.kernels.dequant.scratch import pieces


def decode_i4(blocks: torch.Tensor, out: torch.Tensor) -> None:
    """[d f16, group / 2 bytes]: (q - 8) * d. ``blocks`` uint8 [n, bytes], ``out`` fp32 [n, group]."""
    d, width = half_column(blocks, 0), out.shape[1] // 2
    for at in pieces(len(blocks), out.shape[1]):
        for half in (0, 1):
            q = nibbles(blocks[at], half).view(torch.int8)
            q -= 8
            torch.mul(widen_bytes(q)[:, 2:], d[at], out=out[at, width * half : width * (half + 1)])


def decode_i4_minimum(blocks: torch.Tensor, out: torch.Tensor) -> None:
    """[d f16, m f16, group / 2 bytes]: q * d + m."""
    d, m, width = half_column(blocks, 0), half_column(blocks, 2), out.shape[1] // 2
    for at in pieces(len(blocks), out.shape[1]):
        for half in (0, 1):
            wide = widen_bytes(nibbles(blocks[at], half))
            torch.mul(wide[:, 4:], d[at], out=out[at, width * half : width * (half + 1)])
        out[at] += m[at]


def decode_i8(blocks: torch.Tensor, out: torch.Tensor) -> None:
    """[d f16, group x int8]: x * d."""
    d = half_column(blocks, 0)
    for at in pieces(len(blocks), out.shape[1]):
        torch.mul(widen_bytes(blocks[at].view(torch.int8))[:, 2:], d[at], out=out[at])


def decode_i8_minimum(blocks: torch.Tensor, out: torch.Tensor) -> None:
    """[d f16, m f16, group x uint8]: x * d + m."""
    d, m = half_column(blocks, 0), half_column(blocks, 2)
    for at in pieces(len(blocks), out.shape[1]):
        torch.mul(widen_bytes(blocks[at])[:, 4:], d[at], out=out[at])
        out[at] += m[at]
