"""From chosen experts to work: assignments sorted by expert, without leaving the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Assignments:
    """The A = T * k (token, expert) pairs of a batch, sorted by expert; within an expert in (token, rank) order.

    ``order`` int32 [A]: each one's flat index token * k + rank, where its result belongs; ``tokens`` int32 [A]: its
    token; ``weights`` fp32 [A]: its router weight; ``offsets`` int32 [E + 1]: e has [offsets[e], offsets[e + 1]).
    """

    order: torch.Tensor
    tokens: torch.Tensor
    weights: torch.Tensor
    offsets: torch.Tensor


def sort_assignments(ids: torch.Tensor, weights: torch.Tensor, num_experts: int) -> Assignments:
    """Sort the router's choice by expert. ``ids`` int32 or int64 [T, k] in [0, num_experts), ``weights`` fp32 [T, k].

    Torch operations only, none of which waits for the device; the sort is stable, so the result is the same everywhere.
    """
    top_k = ids.shape[1]
    experts, order = ids.reshape(-1).sort(stable=True)
    bounds = torch.arange(num_experts + 1, dtype=ids.dtype, device=ids.device)
    offsets = torch.searchsorted(experts, bounds, out_int32=True)
    return Assignments(
        order=order.to(torch.int32),
        tokens=torch.div(order, top_k, rounding_mode="floor").to(torch.int32),
        weights=weights.reshape(-1)[order],
        offsets=offsets,
    )
