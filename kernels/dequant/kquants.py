"""GGUF's super-blocks of 256 with sub-blocks of 32: Q4_K and Q5_K (layouts: ggml-common.h).

Bytes are masked and cast over contiguous memory, and no strided operation has more than two dimensions: with three,
torch pays some 50 ns per row of 32. All products are exact in fp32: fp16 scale (11 bits) x sub-scale (6) x quant (5).
"""

from __future__ import annotations

import torch

from batchgen_lite.kernels.dequant.blocks32 import half_column, nibbles, widen_bytes
from batchgen_lite.kernels.dequant.scratch import pieces, scratch


def _scales_and_minima(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """d * scale and dmin * minimum of the eight sub-blocks of Q4_K and Q5_K: fp32 [n * 8, 1] each.

    Twelve bytes at 4 hold 6-bit numbers, four at a time here as the lanes of an int32: bytes 0-3 scales 0-3 and bytes
    4-7 minima 0-3 in their low 6 bits; the low 4 bits of scales and minima 4-7 are the nibbles of bytes 8-11, their
    high 2 bits the top bits of bytes 0-3 and 4-7.
    """
    low, mid, top = blocks.view(torch.int32)[:, 1:4].t().contiguous()
    scales = torch.stack((low & 0x3F3F3F3F, (top & 0x0F0F0F0F) | ((low >> 2) & 0x30303030)), 1)
    minima = torch.stack((mid & 0x3F3F3F3F, ((top >> 4) & 0x0F0F0F0F) | ((mid >> 2) & 0x30303030)), 1)
    d, dmin = half_column(blocks, 0), half_column(blocks, 2)
    return (
        scales.view(torch.uint8).float().mul_(d).view(-1, 1),
        minima.view(torch.uint8).float().mul_(dmin).view(-1, 1),
    )


def _contiguous(slot: str, packed: torch.Tensor) -> torch.Tensor:
    """``packed`` uint8 [n, k * 32], any row stride, copied to scratch as [n * k, 32]."""
    return scratch(slot, packed.numel(), torch.uint8).view(packed.shape).copy_(packed).view(-1, 32)


def decode_q4_k(blocks: torch.Tensor, out: torch.Tensor) -> None:
    """[d f16, dmin f16, 12 scale bytes, 128 bytes]: 32 bytes give sub-block 2i (low nibbles) and 2i + 1 (high ones);
    q * (d * scale) - dmin * minimum."""
    scale, minimum = _scales_and_minima(blocks)
    for at in pieces(len(blocks), 256):
        packed = _contiguous("low", blocks[at, 16:])
        of = slice(8 * at.start, 8 * at.stop)
        sub, factor = out[at].view(-1, 2, 32), scale[of].view(-1, 2, 1)
        for half in (0, 1):
            torch.mul(widen_bytes(nibbles(packed, half)), factor[:, half], out=sub[:, half])
        sub.view(-1, 32).sub_(minimum[of])


def decode_q5_k(blocks: torch.Tensor, out: torch.Tensor) -> None:
    """[d f16, dmin f16, 12 scale bytes, 32 bytes of fifth bits, 128 bytes of nibbles]: as Q4_K; bit i of fifth-bit
    byte l is bit 4 of element l of sub-block i."""
    scale, minimum = _scales_and_minima(blocks)
    for at in pieces(len(blocks), 256):
        packed = _contiguous("low", blocks[at, 48:])
        bits = _contiguous("bits", blocks[at, 16:48])
        fifth = scratch("fifth", packed.numel(), torch.uint8).view(-1, 4, 32)
        of = slice(8 * at.start, 8 * at.stop)
        sub, factor = out[at].view(-1, 2, 32), scale[of].view(-1, 2, 1)
        for half in (0, 1):
            for i in range(4):
                shift_bits(bits, 4 - (2 * i + half), fifth[:, i])
            fifth &= 16
            q = nibbles(packed, half)
            q |= fifth.view(-1, 32)
            torch.mul(widen_bytes(q), factor[:, half], out=sub[:, half])
        sub.view(-1, 32).sub_(minimum[of])


def shift_bits(data: torch.Tensor, left: int, out: torch.Tensor) -> None:
    """``out`` = ``data`` shifted left, or right where ``left`` is negative."""
    if left >= 0:
        torch.bitwise_left_shift(data, left, out=out)
    else:
        torch.bitwise_right_shift(data, -left, out=out)
