"""Widening of packed rows to fp32, for every storage encoding that checkpoints use."""

from __future__ import annotations

from collections.abc import Callable

import torch

from batchgen_lite.kernels.dequant import blocks32, codebook, groups, kquants, kquants16
from batchgen_lite.kernels.dequant.plain import PLAIN_DTYPES, decode_plain
from batchgen_lite.kernels.dequant.scratch import CHUNK_ELEMENTS, PIECE_ELEMENTS, scratch
from batchgen_lite.kernels.dequant.sizes import block_bytes, block_size, row_bytes

_BLOCK_DECODERS: dict[str, Callable[[torch.Tensor, torch.Tensor], None]] = {
    "Q4_0": blocks32.decode_q4_0,
    "Q4_1": blocks32.decode_q4_1,
    "Q5_0": blocks32.decode_q5_0,
    "Q5_1": blocks32.decode_q5_1,
    "Q8_0": blocks32.decode_q8_0,
    "IQ4_NL": codebook.decode_iq4_nl,
    "MXFP4": codebook.decode_mxfp4,
    "Q2_K": kquants16.decode_q2_k,
    "Q3_K": kquants16.decode_q3_k,
    "Q4_K": kquants.decode_q4_k,
    "Q5_K": kquants.decode_q5_k,
    "Q6_K": kquants16.decode_q6_k,
    "I4_G64": groups.decode_i4,
    "I4M_G64": groups.decode_i4_minimum,
    "I8_G64": groups.decode_i8,
    "I8M_G32": groups.decode_i8_minimum,
    "I8M_G64": groups.decode_i8_minimum,
}


def decode_rows(encoding: str, packed: torch.Tensor, out: torch.Tensor) -> None:
    """Widen ``packed`` uint8 [rows, row_bytes(encoding, cols)] to ``out`` fp32 [rows, cols], C-contiguous; of
    F16 and BF16 its rows may lie further apart.

    ``packed`` needs no alignment and may have any row stride. Bit-exact against the gguf package's dequantiser
    where that has the type.
    Scratch of a few MiB per thread is reused. Raises UnsupportedError for an unknown encoding, CheckpointError if cols
    is not a multiple of the block, ValueError if the shapes disagree.
    """
    rows, cols = out.shape
    nbytes = row_bytes(encoding, cols)
    if packed.shape != (rows, nbytes):
        raise ValueError(f"{encoding}: packed is {tuple(packed.shape)}, expected {(rows, nbytes)} for {rows} x {cols}")
    step = max(1, (PIECE_ELEMENTS if encoding in PLAIN_DTYPES else CHUNK_ELEMENTS) // max(cols, 1))
    if rows <= step:
        _decode_chunk(encoding, packed, out)
        return
    for start in range(0, rows, step):
        _decode_chunk(encoding, packed[start : start + step], out[start : start + step])


def _decode_chunk(encoding: str, packed: torch.Tensor, out: torch.Tensor) -> None:
    plain = PLAIN_DTYPES.get(encoding)
    alignment = plain.itemsize if plain is not None else 4
    if plain is None or packed.data_ptr() % alignment or packed.stride(0) % alignment:
        packed = _contiguous(packed, alignment)
    if plain is not None:
        decode_plain(encoding, packed, out)
        return
    blocks = packed.view(-1, block_bytes(encoding))
    _BLOCK_DECODERS[encoding](blocks, out.view(-1, block_size(encoding)))


def _contiguous(packed: torch.Tensor, alignment: int) -> torch.Tensor:
    """``packed`` itself if contiguous and aligned to ``alignment`` bytes, else a copy in scratch that is."""
    if packed.is_contiguous() and packed.data_ptr() % alignment == 0 and packed.storage_offset() % alignment == 0:
        return packed
    copy = scratch("packed", packed.numel(), torch.uint8).view(packed.shape)
    copy.copy_(packed)
    return copy
