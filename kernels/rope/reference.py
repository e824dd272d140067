"""Rotary position embedding (Su et al. 2021, "RoFormer") applied to query and key heads, in torch."""

from __future__ import annotations

import torch


def rotate_(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool = False) -> torch.Tensor:
    """Rotate the first 2 * cos.shape[-1] channels of every head in place and return ``x``.

    ``x`` fp32 [T, heads, D]; ``cos``, ``sin`` fp32 [T, rot / 2] (their attention scaling already applied).
    Pairs are (i, i + rot/2), or (2i, 2i + 1) where ``interleaved``. Further channels pass through.
    """
    half = cos.shape[-1]
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)  # [T, 1, rot/2]
    if interleaved:
        first, second = x[..., 0 : 2 * half : 2], x[..., 1 : 2 * half : 2]
    else:
        first, second = x[..., :half], x[..., half : 2 * half]
    rotated_first = first * cos - second * sin
    rotated_second = second * cos + first * sin
    first.copy_(rotated_first)
    second.copy_(rotated_second)
    return x
