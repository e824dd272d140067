"""GGUF's 4-bit codebook formats: IQ4_NL and MXFP4 (layouts and tables: ggml-common.h).

Their 16 values follow no pattern that bit operations could produce cheaply, so a table serves, but one over whole
bytes: a look-up gives both nibbles' values as the two int8 halves of an int16.
"""

from __future__ import annotations

from functools import cache

import torch

from batchgen_lite.kernels.dequant.blocks32 import half_column
from batchgen_lite.kernels.dequant.scratch import pieces, scratch

IQ4_NL_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
MXFP4_VALUES = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""Twice the values of E2M1 (OCP Microscaling Formats v1.0), with a plain zero for minus zero."""


@cache
def _byte_table(values: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """int16 [256]: low byte the value of the low nibble, high byte that of the high nibble."""
    words = [(values[byte >> 4] << 8) | (values[byte & 15] & 255) for byte in range(256)]
    return torch.tensor(words, dtype=torch.int16, device=device)


def _decode(blocks: torch.Tensor, values: tuple[int, ...], scale: torch.Tensor, out: torch.Tensor) -> None:
    """``blocks`` uint8 [n, bytes] of which the last 16 are codes; ``scale`` fp32 [n, 1]; ``out`` fp32 [n, 32]."""
    for at in pieces(len(blocks), 32):
        codes = blocks[at]
        index = scratch("index", codes.numel(), torch.int32).copy_(codes.view(-1))
        pairs = scratch("pairs", codes.numel(), torch.int16)
        torch.index_select(_byte_table(values, blocks.device), 0, index, out=pairs)
        wide = scratch("wide", codes.numel(), torch.float32).view(codes.shape)
        part = scratch("nibbles", codes.numel(), torch.int16)
        torch.mul(pairs, 256, out=part)
        part >>= 8  # sign-extends the low byte
        for half in (0, 1):
            wide.copy_((part if half == 0 else torch.bitwise_right_shift(pairs, 8, out=part)).view(codes.shape))
            torch.mul(wide[:, -16:], scale[at], out=out[at, 16 * half : 16 * half + 16])


def decode_iq4_nl(blocks: torch.Tensor, out: torch.Tensor) -> None:
    """[d f16, 16 bytes]: value * d, nibbles as Q4_0."""
    _decode(blocks, IQ4_NL_VALUES, half_column(blocks, 0), out)


def decode_mxfp4(blocks: torch.Tensor, out: torch.Tensor) -> None:
    """[e uint8, 16 bytes]: value * 2^(e - 128), nibbles as Q4_0 (the table holds doubled values)."""
    _decode(blocks, MXFP4_VALUES, half_exponents(blocks[:, :1]), out)


@cache
def _half_exponent_table(device: torch.device) -> torch.Tensor:
    """2^(e - 128) for each byte e, fp32 [256]; the two smallest are subnormal (ggml_e8m0_to_fp32_half)."""
    return torch.tensor([2.0 ** (e - 128) for e in range(256)], dtype=torch.float64, device=device).float()


def half_exponents(e: torch.Tensor) -> torch.Tensor:
    """2^(e - 128) of uint8 exponents [n, 1]: fp32 [n, 1]."""
    return torch.index_select(_half_exponent_table(e.device), 0, e.reshape(-1).int()).view(-1, 1)
