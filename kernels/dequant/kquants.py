"""GGUF's super-blocks of 256 with sub-blocks of 32: Q4_K and Q5_K (layouts: ggml-common.h).

The quants are brought into output order as bytes; the cast, the multiply by the scales and the subtraction of the
minima then run over contiguous memory. All products are exact in fp32: fp16 scale (11 bits) x sub-scale (6) x quant
(5).
"""

from __future__ import annotations

import torch

from batchgen_lite.kernels.dequant.blocks32 import half_column
from batchgen_lite.kernels.dequant.scratch import pieces, scratch


def sub_scales(blocks: torch.Tensor, at: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Eight 6-bit scales and minima from 12 bytes at ``at``: uint8 [n, 8] each.

    Bytes 0-3 hold scales 0-3, bytes 4-7 minima 0-3, in their low 6 bits; the low 4 bits of scales and minima 4-7 are
    the nibbles of bytes 8-11, their high 2 bits the top bits of bytes 0-3 and 4-7.
    """
    low, mid, top = blocks[:, at : at + 12].unflatten(1, (3, 4)).unbind(1)
    scales = torch.cat((low & 0x3F, (top & 0x0F) | ((low >> 2) & 0x30)), 1)
    minima = torch.cat((mid & 0x3F, (top >> 4) | ((mid >> 2) & 0x30)), 1)
    return scales, minima


def _scales_and_minima(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """d * scale and dmin * minimum of the sub-blocks of Q4_K and Q5_K: fp32 [n, 8, 1] each."""
    scales, minima = sub_scales(blocks, 4)
    d, dmin = half_column(blocks, 0), half_column(blocks, 2)
    return (d * scales).unsqueeze(2), (dmin * minima).unsqueeze(2)


def _nibbles_in_order(packed: torch.Tensor) -> torch.Tensor:
    """``packed`` uint8 [n, 128], any row stride: 32 bytes give sub-block 2i (low nibbles) and 2i + 1 (high ones);
    uint8 [n, 8, 32] in scratch."""
    n = packed.shape[0]
    data = scratch("low", n * 128, torch.uint8).view(n, 128).copy_(packed).view(4 * n, 32)
    q = scratch("nibbles", n * 256, torch.uint8)
    halves = q.view(4 * n, 2, 32)
    torch.bitwise_and(data, 15, out=halves[:, 0])
    torch.bitwise_right_shift(data, 4, out=halves[:, 1])
    return q.view(n, 8, 32)


def decode_q4_k(blocks: torch.Tensor, out: torch.Tensor) -> None:
    """[d f16, dmin f16, 12 scale bytes, 128 bytes of nibbles]: q * (d * scale) - dmin * minimum."""
    scale, minimum = _scales_and_minima(blocks)
    for at in pieces(len(blocks), 256):
        sub = out[at].view(-1, 8, 32)
        sub.copy_(_nibbles_in_order(blocks[at, 16:]))
        sub *= scale[at]
        sub -= minimum[at]


def decode_q5_k(blocks: torch.Tensor, out: torch.Tensor) -> None:
    """[d f16, dmin f16, 12 scale bytes, 32 bytes of fifth bits, 128 bytes of nibbles]: as Q4_K; bit i of fifth-bit
    byte l is bit 4 of element l of sub-block i."""
    scale, minimum = _scales_and_minima(blocks)
    for at in pieces(len(blocks), 256):
        q = _nibbles_in_order(blocks[at, 48:])
        bits = blocks[at, 16:48]
        fifth = scratch("fifth", q.numel(), torch.uint8).view(q.shape)
        for i in range(8):
            shift_bits(bits, 4 - i, fifth[:, i])
        fifth &= 16
        q |= fifth
        sub = out[at].view(-1, 8, 32)
        sub.copy_(q)
        sub *= scale[at]
        sub -= minimum[at]


def shift_bits(data: torch.Tensor, left: int, out: torch.Tensor) -> None:
    """``out`` = ``data`` shifted left, or right where ``left`` is negative."""
    if left >= 0:
        torch.bitwise_left_shift(data, left, out=out)
    else:
        torch.bitwise_right_shift(data, -left, out=out)
