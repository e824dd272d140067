"""Group-wise rounding of weight rows to 4 or 8 bits, into the blocks that kernels/dequant widens again."""

from __future__ import annotations

import torch

from batchgen_lite.errors import CheckpointError, UsageError
from batchgen_lite.kernels.dequant.sizes import block_bytes, block_size

_ENCODINGS = {
    (4, 32, False): "Q4_0",
    (4, 32, True): "Q4_1",
    (4, 64, False): "I4_G64",
    (4, 64, True): "I4M_G64",
    (8, 32, False): "Q8_0",
    (8, 32, True): "I8M_G32",
    (8, 64, False): "I8_G64",
    (8, 64, True): "I8M_G64",
}
_SETTINGS = {name: (bits, zero_points) for (bits, _, zero_points), name in _ENCODINGS.items()}


def encoding_for(bits: int, group: int, zero_points: bool) -> str:
    """The storage encoding of these settings; GGUF's own type where it has one. UsageError for others."""
    name = _ENCODINGS.get((bits, group, zero_points))
    if name is None:
        raise UsageError(f"{bits} bits in groups of {group}: bits must be 4 or 8 and groups 32 or 64 weights long")
    return name


def quantise_rows(encoding: str, rows: torch.Tensor, what: str) -> torch.Tensor:
    """``rows`` fp32 [n, cols], cols a multiple of the group, as stored blocks: uint8 [n, row bytes].

    Each weight becomes the code nearest to it given its group's fp16 scale (and minimum). Without zero points the
    weight of largest size decides: it is -8 scales with 4 bits (as ggml's Q4_0), 127 scales with 8. Raises
    CheckpointError, naming ``what``, for weights that are not finite or too large for fp16 scales.
    """
    bits, zero_points = _SETTINGS[encoding]
    group = block_size(encoding)
    weights = rows.reshape(-1, group)  # [blocks, group]
    out = torch.empty(weights.shape[0], block_bytes(encoding), dtype=torch.uint8)
    if zero_points:
        low, high = weights.amin(1, keepdim=True), weights.amax(1, keepdim=True)
        header = torch.cat([(high - low) / (2**bits - 1), low], 1).half()
        scale, offset = header[:, :1].float(), header[:, 1:].float()
        span = 0, 2**bits - 1
    else:
        header = _symmetric_scale(weights, bits).half()
        scale, offset = header.float(), torch.zeros(1)
        span = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    if not bool(torch.isfinite(header).all()):
        raise CheckpointError(f"{what} holds weights that are not finite, or too large for fp16 scales (65504)")
    codes = torch.sub(weights, offset).div_(torch.where(scale == 0, 1.0, scale)).round_().clamp_(*span)
    start = 2 * header.shape[1]
    out[:, :start] = header.view(torch.uint8)
    if bits == 8:
        out[:, start:] = codes.to(torch.uint8 if zero_points else torch.int8).view(torch.uint8)
        return out.view(len(rows), -1)
    nibbles = (codes if zero_points else codes.add_(8)).to(torch.uint8)
    torch.bitwise_or(nibbles[:, : group // 2], nibbles[:, group // 2 :] << 4, out=out[:, start:])
    return out.view(len(rows), -1)


def _symmetric_scale(weights: torch.Tensor, bits: int) -> torch.Tensor:
    """fp32 [blocks, 1]."""
    if bits == 8:
        return weights.abs().amax(1, keepdim=True) / 127
    low, high = weights.amin(1, keepdim=True), weights.amax(1, keepdim=True)
    return torch.where(-low >= high, low, high) / -8
