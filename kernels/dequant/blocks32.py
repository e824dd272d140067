"""GGUF's blocks of 32 with an fp16 scale: Q4_0, Q4_1, Q5_0, Q5_1, Q8_0 (layouts: ggml-common.h).

Casting bytes to fp32 is fast only over contiguous memory, while a strided fp32 multiply costs little. So the whole
block, scale bytes included, is masked and cast in one contiguous pass, and the multiply by the scale picks the
elements out. All products are exact in fp32 (11-bit scale times at most 8 bits), so the order of the exact
operations does not matter and the results equal ggml's bit for bit.
"""

from __future__ import annotations

import torch

from batchgen_lite.kernels.dequant.scratch import scratch


def half_column(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """The fp16 number at byte ``at`` (even) of each block, widened: fp32 [n, 1]."""
    return blocks.view(torch.float16)[:, at // 2 : at // 2 + 1].float()


def _widen(blocks: torch.Tensor, slot: str = "wide") -> torch.Tensor:
    """All bytes of ``blocks`` as fp32 [n, bytes]."""
    wide = scratch(slot, blocks.numel(), torch.float32).view(blocks.shape)
    wide.copy_(blocks)
    return wide


def nibbles(blocks: torch.Tensor, high: bool) -> torch.Tensor:
    """The low or high nibbles of all bytes: uint8 [n, bytes]."""
    part = scratch("nibbles", blocks.numel(), torch.uint8).view(blocks.shape)
    if high:
        return torch.bitwise_right_shift(blocks, 4, out=part)
    return torch.bitwise_and(blocks, 15, out=part)


def decode_q8_0(blocks: torch.Tensor, out: torch.Tensor) -> None:
    """[d f16, 32 x int8]: x * d."""
    wide = _widen(blocks.view(torch.int8))
    torch.mul(wide[:, 2:], half_column(blocks, 0), out=out)


def decode_q4_0(blocks: torch.Tensor, out: torch.Tensor) -> None:
    """[d f16, 16 bytes]: low nibbles are elements 0-15, high nibbles 16-31; (q - 8) * d."""
    d = half_column(blocks, 0)
    for half in (0, 1):
        q = nibbles(blocks, half == 1).view(torch.int8)
        q -= 8
        torch.mul(_widen(q)[:, 2:], d, out=out[:, 16 * half : 16 * half + 16])


def decode_q4_1(blocks: torch.Tensor, out: torch.Tensor) -> None:
    """[d f16, m f16, 16 bytes]: q * d + m."""
    d = half_column(blocks, 0)
    for half in (0, 1):
        torch.mul(_widen(nibbles(blocks, half == 1))[:, 4:], d, out=out[:, 16 * half : 16 * half + 16])
    out += half_column(blocks, 2)
