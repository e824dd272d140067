"""GGUF's blocks of 32 with an fp16 scale: Q4_0, Q4_1, Q5_0, Q5_1, Q8_0 (layouts: ggml-common.h).

What torch does fast on a CPU decides the form of all decoders here. A cast from bytes to fp32 is fast over contiguous
memory only, while a strided fp32 multiply costs little if its operands have two dimensions. So the whole block, scale
bytes included, is masked and cast in one contiguous pass, and the multiply by the scale picks the elements out.

All products are exact in fp32 (an 11-bit scale times at most 8 bits), so ggml's results come out bit for bit whether
or not the multiply and the add are fused.
"""

from __future__ import annotations

import torch

from batchgen_lite.kernels.dequant.scratch import pieces, scratch

EVERY_BYTE = 0x0101010101010101
_BIT_I_OF_BYTE_I = 0x8040201008040201 - (1 << 64)  # as a signed number


def half_column(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """The fp16 number at byte ``at`` (even) of each block, widened: fp32 [n, 1]."""
    return blocks.view(torch.float16)[:, at // 2 : at // 2 + 1].float()


def widen_bytes(data: torch.Tensor) -> torch.Tensor:
    """Contiguous uint8 or int8 of any shape as fp32 of that shape, in scratch."""
    wide = scratch("wide", data.numel(), torch.float32).view(data.shape)
    return wide.copy_(data)


def nibbles(data: torch.Tensor, half: int) -> torch.Tensor:
    """The low (0) or high (1) nibbles of contiguous bytes: uint8 of the same shape, in scratch."""
    part = scratch("nibbles", data.numel(), torch.uint8).view(data.shape)
    if half:
        return torch.bitwise_right_shift(data, 4, out=part)
    return torch.bitwise_and(data, 15, out=part)


def decode_q8_0(blocks: torch.Tensor, out: torch.Tensor) -> None:
    """[d f16, 32 x int8]: x * d."""
    d = half_column(blocks, 0)
    for at in pieces(len(blocks), 32):
        torch.mul(widen_bytes(blocks[at].view(torch.int8))[:, 2:], d[at], out=out[at])


def decode_q4_0(blocks: torch.Tensor, out: torch.Tensor) -> None:
    """[d f16, 16 bytes]: low nibbles are elements 0-15, high nibbles 16-31; (q - 8) * d."""
    d = half_column(blocks, 0)
    for at in pieces(len(blocks), 32):
        for half in (0, 1):
            q = nibbles(blocks[at], half).view(torch.int8)
            q -= 8
            torch.mul(widen_bytes(q)[:, 2:], d[at], out=out[at, 16 * half : 16 * half + 16])


def decode_q4_1(blocks: torch.Tensor, out: torch.Tensor) -> None:
    """[d f16, m f16, 16 bytes]: q * d + m."""
    d, m = half_column(blocks, 0), half_column(blocks, 2)
    for at in pieces(len(blocks), 32):
        for half in (0, 1):
            wide = widen_bytes(nibbles(blocks[at], half))
            torch.mul(wide[:, 4:], d[at], out=out[at, 16 * half : 16 * half + 16])
        out[at] += m[at]


def decode_q5_0(blocks: torch.Tensor, out: torch.Tensor) -> None:
    """[d f16, 32 high bits, 16 bytes]: (q - 16) * d, where bit j of the high bits is bit 4 of element j."""
    d = half_column(blocks, 0)
    for at in pieces(len(blocks), 32):
        _add_fifth_bits(blocks[at], 2, -16, out[at])
        out[at] *= d[at]


def decode_q5_1(blocks: torch.Tensor, out: torch.Tensor) -> None:
    """[d f16, m f16, 32 high bits, 16 bytes]: q * d + m."""
    d, m = half_column(blocks, 0), half_column(blocks, 2)
    for at in pieces(len(blocks), 32):
        _add_fifth_bits(blocks[at], 4, 0, out[at])
        out[at] *= d[at]
        out[at] += m[at]


def _add_fifth_bits(blocks: torch.Tensor, at: int, offset: int, out: torch.Tensor) -> None:
    """``out`` = 5-bit numbers plus ``offset``: bit 4 from the 4 bytes at ``at``, nibbles from the 16 bytes behind."""
    out.copy_(_spread_bits(blocks, at))
    for half in (0, 1):
        q = nibbles(blocks, half).view(torch.int8)
        if offset:
            q += offset
        part = out[:, 16 * half : 16 * half + 16]
        torch.add(widen_bytes(q)[:, at + 4 :], part, alpha=16, out=part)


def _spread_bits(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """The 32 bits of the 4 bytes at ``at``, lowest first: 0 or 1, uint8 [n, 32].

    Eight bits become eight bytes in one int64: the byte is copied eight times, byte i keeps bit i only, and adding
    127 carries whatever is left into bit 7.
    """
    halves = blocks.view(torch.int16)[:, at // 2 : at // 2 + 2]
    bits = scratch("bits", halves.numel(), torch.int16).view(-1, 2)
    bits[:, 0].copy_(halves[:, 0])
    bits[:, 1].copy_(halves[:, 1])
    lanes = scratch("lanes", bits.numel() * 2, torch.int64).view(-1, 4)
    lanes.copy_(bits.view(torch.uint8))
    lanes *= EVERY_BYTE
    lanes &= _BIT_I_OF_BYTE_I
    lanes += 0x7F * EVERY_BYTE
    lanes >>= 7
    lanes &= EVERY_BYTE
    return lanes.view(torch.uint8)
