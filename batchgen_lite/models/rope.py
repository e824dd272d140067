"""Rotary tables: inverse frequencies of each rope kind, and cos/sin by position.

The order of operations follows transformers' ``modeling_rope_utils`` so that the fp32 results are bitwise equal.
"""

from __future__ import annotations

import math

import torch

from batchgen_lite.errors import UnsupportedError
from batchgen_lite.models.rope_config import yarn_mscale
from batchgen_lite.models.spec import RopeSpec


def rope_frequencies(spec: RopeSpec) -> tuple[torch.Tensor, float]:
    """Inverse frequencies fp32 [dim / 2] in radians per position, and the factor on cos and sin."""
    exponents = torch.arange(0, spec.dim, 2, dtype=torch.float32) / spec.dim
    powers = spec.theta**exponents  # [dim / 2]
    scaling = 1.0
    if spec.kind == "default":
        inv_freq = 1.0 / powers
    elif spec.kind == "linear":
        inv_freq = 1.0 / powers / spec.factor
    elif spec.kind == "llama3":
        inv_freq = _llama3(1.0 / powers, spec)
    elif spec.kind == "yarn":
        inv_freq, scaling = _yarn(powers, spec), _yarn_scaling(spec)
    else:
        raise UnsupportedError(f"rope type {spec.kind!r} is not implemented; only default, linear, llama3 and yarn.")
    if spec.freq_factors is not None:
        inv_freq = inv_freq / torch.tensor(spec.freq_factors, dtype=torch.float32)
    return inv_freq, scaling


def rope_tables(spec: RopeSpec, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin, fp32 [T, dim / 2] each, of ``positions`` int64 [T], the kind's factor included."""
    inv_freq, scaling = rope_frequencies(spec)
    angles = positions[:, None].float() * inv_freq  # [T, dim / 2]
    return angles.cos() * scaling, angles.sin() * scaling


def _need(value: float | None, name: str) -> float:
    if value is None:
        raise UnsupportedError(f"rope parameters lack {name!r}, which this rope type needs.")
    return value


def _llama3(inv_freq: torch.Tensor, spec: RopeSpec) -> torch.Tensor:
    """Llama 3.1: long wavelengths are stretched by ``factor``, short ones kept, those between blended."""
    low = _need(spec.low_freq_factor, "low_freq_factor")
    high = _need(spec.high_freq_factor, "high_freq_factor")
    original = _need(spec.original_max_positions, "original_max_position_embeddings")
    wavelength = 2 * math.pi / inv_freq
    long, short = wavelength > original / low, wavelength < original / high
    stretched = torch.where(long, inv_freq / spec.factor, inv_freq)
    smooth = (original / wavelength - low) / (high - low)
    blended = (1 - smooth) * stretched / spec.factor + smooth * stretched
    return torch.where(~short & ~long, blended, stretched)


def _yarn(powers: torch.Tensor, spec: RopeSpec) -> torch.Tensor:
    """YaRN (arXiv 2309.00071, section 3.2): interpolate slow channels, keep fast ones, ramp in between."""
    original = _need(spec.original_max_positions, "original_max_position_embeddings")

    def channel(rotations: float) -> float:
        """The channel that turns ``rotations`` times over the original context."""
        return (spec.dim * math.log(original / (rotations * 2 * math.pi))) / (2 * math.log(spec.theta))

    low, high = channel(_need(spec.beta_fast, "beta_fast")), channel(_need(spec.beta_slow, "beta_slow"))
    if spec.truncate:
        low, high = float(math.floor(low)), float(math.ceil(high))
    low, high = max(low, 0), min(high, spec.dim - 1)
    if low == high:
        high += 0.001  # avoids 0 / 0
    ramp = ((torch.arange(spec.dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    keep = 1 - ramp
    return 1.0 / (spec.factor * powers) * (1 - keep) + 1.0 / powers * keep


def _yarn_scaling(spec: RopeSpec) -> float:
    if spec.attention_factor is not None:
        return spec.attention_factor
    if spec.mscale and spec.mscale_all_dim:
        return yarn_mscale(spec.factor, spec.mscale) / yarn_mscale(spec.factor, spec.mscale_all_dim)
    return yarn_mscale(spec.factor)
