"""GGUF's super-blocks of 256 with sub-blocks of 16: Q2_K, Q3_K and Q6_K (layouts: ggml-common.h).

Written as kquants.py is. In all three, element 128 h + 32 j + l takes its two bits 2j and 2j + 1 from byte l of half h.
"""

from __future__ import annotations

import torch

from batchgen_lite.kernels.dequant.blocks32 import half_column
from batchgen_lite.kernels.dequant.kquants import shift_bits
from batchgen_lite.kernels.dequant.scratch import pieces, scratch


def _four_planes(slot: str, packed: torch.Tensor, left: int, mask: int, step: int = 2) -> torch.Tensor:
    """uint8 [2n, 4, 32] in scratch: plane j is ``packed`` [2n, 32] shifted left by ``left - step * j`` and masked."""
    planes = scratch(slot, packed.numel() * 4, torch.uint8).view(-1, 4, 32)
    for j in range(4):
        shift_bits(packed, left - step * j, planes[:, j])
    planes &= mask
    return planes


def _half_rows(slot: str, packed: torch.Tensor) -> torch.Tensor:
    """``packed`` [n, 2 * width], any row stride, as contiguous [2n, width] in scratch."""
    data = scratch(slot, packed.numel(), torch.uint8).view(packed.shape).copy_(packed)
    return data.view(-1, packed.shape[1] // 2)


def decode_q2_k(blocks: torch.Tensor, out: torch.Tensor) -> None:
    """[16 bytes: scale low nibble, minimum high nibble; 64 bytes; d f16, dmin f16]: q * (d * scale) - dmin * min."""
    packed_scales = blocks[:, :16]
    scale = (half_column(blocks, 80) * (packed_scales & 15)).unsqueeze(2)
    minimum = (half_column(blocks, 82) * (packed_scales >> 4)).unsqueeze(2)
    for at in pieces(len(blocks), 256):
        q = _four_planes("nibbles", _half_rows("low", blocks[at, 16:80]), 0, 3)
        sub = out[at].view(-1, 16, 16)
        sub.copy_(q.view(-1, 16, 16))
        sub *= scale[at]
        sub -= minimum[at]


def decode_q3_k(blocks: torch.Tensor, out: torch.Tensor) -> None:
    """[32 bytes of third bits, 64 bytes, 12 scale bytes, d f16]: (q - 4) * (d * (scale - 32)); bit 4h + j of third-bit
    byte l is bit 2 of element 128 h + 32 j + l."""
    scale = (half_column(blocks, 108) * _q3_scales(blocks[:, 96:108])).unsqueeze(2)
    for at in pieces(len(blocks), 256):
        q = _four_planes("nibbles", _half_rows("low", blocks[at, 32:96]), 0, 3)
        third = scratch("bits", q.shape[0] * 32, torch.uint8).view(-1, 2, 32)
        third[:, 0].copy_(blocks[at, :32])
        torch.bitwise_right_shift(blocks[at, :32], 4, out=third[:, 1])
        q |= _four_planes("fifth", third.view(-1, 32), 2, 4, 1)
        q -= 4
        sub = out[at].view(-1, 16, 16)
        sub.copy_(q.view(torch.int8).view(-1, 16, 16))
        sub *= scale[at]


def _q3_scales(packed: torch.Tensor) -> torch.Tensor:
    """Sixteen 6-bit scales less 32 from 12 bytes: int8 [n, 16]. The low 4 bits of scales 0-7 and 8-15 are the low and
    high nibbles of bytes 0-7; bits 2i and 2i + 1 of bytes 8-11 are the high bits of scales 4i to 4i + 3."""
    low, top = packed[:, :8], packed[:, 8:]
    nibble = torch.cat((low & 15, low >> 4), 1)
    high = torch.cat(((top << 4) & 48, (top << 2) & 48, top & 48, (top >> 2) & 48), 1)
    return (nibble | high).view(torch.int8) - 32


def decode_q6_k(blocks: torch.Tensor, out: torch.Tensor) -> None:
    """[128 bytes of nibbles, 64 bytes of high pairs of bits, 16 x int8 scales, d f16]: (q - 32) * (d * scale). The low
    nibbles of a half's 64 bytes are its first 64 elements, the high nibbles the other 64."""
    scale = (half_column(blocks, 208) * blocks[:, 192:208].view(torch.int8)).unsqueeze(2)
    for at in pieces(len(blocks), 256):
        q = _four_planes("fifth", _half_rows("bits", blocks[at, 128:192]), 4, 48)
        low = _half_rows("low", blocks[at, :128])  # [2n, 64]
        nibble = scratch("nibbles", q.numel(), torch.uint8).view(-1, 128)
        torch.bitwise_and(low, 15, out=nibble[:, :64])
        torch.bitwise_right_shift(low, 4, out=nibble[:, 64:])
        q |= nibble.view(q.shape)
        q -= 32
        sub = out[at].view(-1, 16, 16)
        sub.copy_(q.view(torch.int8).view(-1, 16, 16))
        sub *= scale[at]
