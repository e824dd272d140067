"""int8 KV in torch: the reference of the quantising kernel, the CPU's production path, and what int8 KV means.

Every position and head has a scale of its own. A scale per page would save 1/64 of the bytes, but is known only when
the page is full: a row's bits would then depend on when its page filled, or every running sequence would keep its last
page unquantised beside the pool. With its own scale a position is quantised once, when it is written, and stays as it
is: nothing depends on how a prompt was cut into spans.
"""

from __future__ import annotations

import torch


def quantise(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of ``x`` [..., D] as int8 [..., D] and fp32 scales [...]: q = round(x / s), ties to even, s = max |x| / 127.

    A row of zeros has scale 0; one that is not finite has a scale that is not, so that it is NaN when read.
    """
    x = x.float()
    scale = x.abs().amax(-1) / 127.0
    inverse = torch.where(scale > 0, 1.0 / scale, 0.0)
    # A NaN may become any int8: its scale says NaN already.
    rounded = (x * inverse.unsqueeze(-1)).nan_to_num_(0.0).clamp_(-127, 127).round_()
    return rounded.to(torch.int8), scale


def dequantise(q: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """fp32 [..., D] of int8 ``q`` of that shape and its scales [...]."""
    return q.float() * scale.unsqueeze(-1)


def quantise_write(rows: torch.Tensor, pages: torch.Tensor, scales: torch.Tensor, slots: torch.Tensor) -> None:
    """Store ``rows`` [T, Hkv, D] at ``slots`` int64 [T] (page * 64 + place) of ``pages`` int8 [P, Hkv, 64, D] and
    ``scales`` fp32 [P, Hkv, 64]."""
    page, place = slots // 64, slots % 64
    pages[page, :, place], scales[page, :, place] = quantise(rows)
