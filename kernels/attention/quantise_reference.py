"""int8 KV pages in torch: the reference of the quantising kernel, and what int8 pages mean."""

from __future__ import annotations

import torch


def quantise_pages(staged: torch.Tensor, pages: torch.Tensor, scales: torch.Tensor, pairs: torch.Tensor) -> None:
    """Quantise full pages: q = round(x / s), ties to even, s = max |x| / 127 over a page and head, 0 where all is 0.

    ``staged`` floats [S, Hkv, 64, D]; ``pages`` int8 [P, Hkv, 64, D]; ``scales`` fp32 [P, Hkv]; ``pairs`` integers
    [n, 2]: (staging page, pool page). Every page stands for itself, so its bytes depend on no other.
    """
    source, target = pairs[:, 0].long(), pairs[:, 1].long()
    x = staged[source].float()
    scale = x.abs().amax((2, 3)) / 127.0  # [n, Hkv]
    inverse = torch.where(scale > 0, 1.0 / scale, 0.0)
    pages[target] = (x * inverse[:, :, None, None]).clamp_(-127, 127).round_().to(torch.int8)
    scales[target] = scale


def dequantise_pages(pages: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """fp32 [n, Hkv, 64, D] of int8 ``pages`` of that shape and their ``scales`` [n, Hkv]."""
    return pages.float() * scales[:, :, None, None]
