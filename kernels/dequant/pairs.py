"""Two 4-bit values per byte, low nibble first: grouped int4 (GPTQ, compressed-tensors) and gpt-oss' MXFP4 blocks.

One look-up per byte gives both values at once, already fp32 and in output order: the table's entries are pairs of fp32
numbers, moved as one 64-bit word each. That beats bit tricks here, because nibbles alternate in the output.
"""

from __future__ import annotations

from functools import cache

import torch

from batchgen_lite.kernels.dequant.codebook import half_exponents
from batchgen_lite.kernels.dequant.scratch import pieces, scratch

_E2M1_DOUBLED = (0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, -0.0, -1.0, -2.0, -3.0, -4.0, -6.0, -8.0, -12.0)


@cache
def _pair_table(values: tuple[float, ...], device: torch.device) -> torch.Tensor:
    """int64 [256] whose words are the fp32 values of a byte's low and high nibble."""
    pairs = [(values[byte & 15], values[byte >> 4]) for byte in range(256)]
    return torch.tensor(pairs, dtype=torch.float32, device=device).view(torch.int64).view(256)


def look_up_pairs(packed: torch.Tensor, values: tuple[float, ...], out: torch.Tensor) -> None:
    """``out`` fp32 [n, 2 * width], contiguous = the values of the nibbles of ``packed`` uint8 [n, width]."""
    index = scratch("index", packed.numel(), torch.int32).view(packed.shape).copy_(packed)
    torch.index_select(_pair_table(values, packed.device), 0, index.view(-1), out=out.view(-1).view(torch.int64))


def decode_mxfp4_pairs(packed: torch.Tensor, exponents: torch.Tensor, out: torch.Tensor) -> None:
    """OCP MXFP4 with its scales apart: E2M1 value * 2^(e - 127).

    ``packed`` uint8 [n, cols / 2], ``exponents`` uint8 [n, cols / 32], ``out`` fp32 [n, cols], contiguous. As
    transformers' ``convert_moe_packed_tensors`` (bit for bit in fp32, minus zeros included).
    """
    for at in pieces(*out.shape):
        look_up_pairs(packed[at], _E2M1_DOUBLED, out[at])
        scaled = out[at].view(-1, 32)
        scaled *= half_exponents(exponents[at].reshape(-1, 1))


def decode_grouped_int4(
    packed: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, out: torch.Tensor
) -> None:
    """(q - zero) * scale of unsigned nibbles q.

    ``packed`` uint8 [n, cols / 2], ``scales`` fp32 [n, groups] where cols is a multiple of groups, ``zeros`` fp32 of
    the same shape, or None for 8 everywhere; ``out`` fp32 [n, cols], contiguous. Exact for scales of at most 16 bits.
    """
    offset = 8.0 if zeros is None else 0.0
    values = tuple(float(q) - offset for q in range(16))
    for at in pieces(*out.shape):
        look_up_pairs(packed[at], values, out[at])
        _scale_groups(scales[at], None if zeros is None else zeros[at], out[at])


def decode_grouped_int8(
    packed: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, out: torch.Tensor
) -> None:
    """(q - zero) * scale of unsigned bytes q, zero = 128 where ``zeros`` is None; shapes as ``decode_grouped_int4``."""
    for at in pieces(*out.shape):
        out[at] = packed[at]
        if zeros is None:
            out[at] -= 128.0
        _scale_groups(scales[at], None if zeros is None else zeros[at], out[at])


def _scale_groups(scales: torch.Tensor, zeros: torch.Tensor | None, out: torch.Tensor) -> None:
    grouped = out.view(scales.numel(), -1)
    if zeros is not None:
        grouped -= zeros.reshape(-1, 1)
    grouped *= scales.reshape(-1, 1)
