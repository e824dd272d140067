"""RMSNorm in torch: the CPU's production path and the oracle of the fused kernel.

y = x / sqrt(mean(x^2) + eps) * weight (Zhang & Sennrich 2019, "Root Mean Square Layer Normalization"), in fp32.
Each row is reduced by itself, so its bits do not depend on the rows beside it.
"""

from __future__ import annotations

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor | None = None) -> torch.Tensor:
    """``x`` fp32 [T, H] (or [..., H]), ``weight`` fp32 [H]; the result goes to ``out``, which may be ``x`` itself."""
    scale = (x * x).sum(-1)  # [T]
    scale = scale.div_(x.shape[-1]).add_(eps).rsqrt_().unsqueeze(-1)
    result = torch.mul(x, scale, out=out)
    return result.mul_(weight)
