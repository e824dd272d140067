"""GGUF's super-blocks of 256 with sub-blocks of 16: Q2_K, Q3_K and Q6_K (layouts: ggml-common.h).

Masks and shifts run over contiguous memory, eight bytes at a time as int64: what a shift moves into the neighbouring
byte is masked away. The cast brings the four planes into output order. In all three, element 128 h + 32 j + l (plane
j) takes its two bits 2j and 2j + 1 from byte l of half h.
"""

from __future__ import annotations

import torch

from batchgen_lite.kernels.dequant.blocks32 import EVERY_BYTE, half_column
from batchgen_lite.kernels.dequant.kquants import shift_bits
from batchgen_lite.kernels.dequant.scratch import pieces, scratch


def _lanes(slot: str, numel: int) -> torch.Tensor:
    """Scratch of ``numel`` bytes, as int64."""
    return scratch(slot, numel, torch.uint8).view(torch.int64)


def _gather(slot: str, packed: torch.Tensor) -> torch.Tensor:
    """``packed`` uint8 of any strides, contiguous in scratch, as int64 [bytes / 8]."""
    lanes = _lanes(slot, packed.numel())
    lanes.view(torch.uint8).view(packed.shape).copy_(packed)
    return lanes


def _four_planes(slot: str, packed: torch.Tensor, left: int, step: int, mask: int) -> torch.Tensor:
    """int64 [4, lanes] in scratch: plane j is ``packed`` shifted left by ``left - step * j``, its bytes masked."""
    planes = _lanes(slot, packed.numel() * 32).view(4, -1)
    for j in range(4):
        shift_bits(packed, left - step * j, planes[j])
    planes &= mask * EVERY_BYTE
    return planes


def _widen_planes(planes: torch.Tensor, dtype: torch.dtype, out: torch.Tensor) -> torch.Tensor:
    """Cast bytes [4, 2n * 32] to ``out`` fp32 [n, 256]; returns it as [n * 16, 16]."""
    halves = out.view(-1, 4, 32)
    for j in range(4):
        halves[:, j].copy_(planes[j].view(dtype).view(-1, 32))
    return out.view(-1, 16)


def decode_q2_k(blocks: torch.Tensor, out: torch.Tensor) -> None:
    """[16 bytes: scale low nibble, minimum high nibble; 64 bytes; d f16, dmin f16]: q * (d * scale) - dmin * min."""
    nibble_pairs = blocks[:, :16].contiguous()
    scale = _times(nibble_pairs & 15, half_column(blocks, 80))
    minimum = _times(nibble_pairs >> 4, half_column(blocks, 82))
    for at in pieces(len(blocks), 256):
        q = _four_planes("nibbles", _gather("low", blocks[at, 16:80]), 0, 2, 3)
        sub = _widen_planes(q, torch.uint8, out[at])
        sub *= scale[16 * at.start : 16 * at.stop]
        sub -= minimum[16 * at.start : 16 * at.stop]


def decode_q3_k(blocks: torch.Tensor, out: torch.Tensor) -> None:
    """[32 bytes of third bits, 64 bytes, 12 scale bytes, d f16]: (q - 4) * (d * (scale - 32)); bit 4h + j of third-bit
    byte l is bit 2 of element 128 h + 32 j + l."""
    scale = _times(_q3_scales(blocks), half_column(blocks, 108))
    for at in pieces(len(blocks), 256):
        n = at.stop - at.start
        third = _lanes("bits", n * 64).view(n, 2, 4)
        bits = _gather("low", blocks[at, :32]).view(n, 4)
        third[:, 0].copy_(bits)
        torch.bitwise_right_shift(bits, 4, out=third[:, 1])
        q = _four_planes("nibbles", _gather("low", blocks[at, 32:96]), 0, 2, 3)
        q |= _four_planes("fifth", third.view(-1), 2, 1, 4)
        signed = q.view(torch.int8)
        signed -= 4
        sub = _widen_planes(q, torch.int8, out[at])
        sub *= scale[16 * at.start : 16 * at.stop]


def _q3_scales(blocks: torch.Tensor) -> torch.Tensor:
    """Sixteen 6-bit scales less 32 from the 12 bytes at 96: int8 [n, 16].

    The low 4 bits of scales 0-7 and 8-15 are the low and high nibbles of bytes 0-7; bits 2i and 2i + 1 of bytes 8-11
    are the high bits of scales 4i to 4i + 3. Two bytes at a time here, as the lanes of an int16.
    """
    lanes = blocks.view(torch.int16)[:, 48:54].t().contiguous()  # [6, n]
    low, top = lanes[:4], lanes[4:]
    nibble = torch.cat((low & 0x0F0F, (low >> 4) & 0x0F0F))  # [8, n]
    high = torch.cat(((top << 4) & 0x3030, (top << 2) & 0x3030, top & 0x3030, (top >> 2) & 0x3030))
    return (nibble | high).t().contiguous().view(torch.int8).sub_(32)


def _times(factors: torch.Tensor, d: torch.Tensor) -> torch.Tensor:
    """``factors`` bytes [n, 16] times ``d`` fp32 [n, 1]: fp32 [n * 16, 1]."""
    return factors.float().mul_(d).view(-1, 1)


def decode_q6_k(blocks: torch.Tensor, out: torch.Tensor) -> None:
    """[128 bytes of nibbles, 64 bytes of high pairs of bits, 16 x int8 scales, d f16]: (q - 32) * (d * scale). Of the
    two runs of 32 nibble bytes of a half, low nibbles are planes 0 and 1, high nibbles planes 2 and 3."""
    scale = _times(blocks[:, 192:208].contiguous().view(torch.int8), half_column(blocks, 208))
    for at in pieces(len(blocks), 256):
        q = _four_planes("fifth", _gather("bits", blocks[at, 128:192]), 4, 2, 48)
        runs = blocks[at, :128].view(-1, 2, 2, 32).permute(2, 0, 1, 3)  # [run, n, half, 32]
        low = _gather("low", runs).view(2, -1)
        nibble = _lanes("nibbles", low.numel() * 8).view(2, -1)
        for half in (0, 1):
            torch.bitwise_right_shift(low, 4 * half, out=nibble)
            nibble &= 15 * EVERY_BYTE
            q[2 * half : 2 * half + 2] |= nibble
        signed = q.view(torch.int8)
        signed -= 32
        sub = _widen_planes(q, torch.int8, out[at])
        sub *= scale[16 * at.start : 16 * at.stop]
