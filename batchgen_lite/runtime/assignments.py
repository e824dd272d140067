"""Which token goes to which expert: all choices of a batch grouped by expert, each group padded for its GEMMs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from batchgen_lite.kernels.padding import ROW_PADDING, padded


@dataclass(frozen=True, slots=True)
class ExpertRows:
    """One expert's share. ``tokens`` int64 [n], ascending; ``index`` int64 and ``weights`` fp32 [n rounded up]: the
    same tokens and their weights, padded with token 0 of weight 0."""

    tokens: torch.Tensor
    index: torch.Tensor
    weights: torch.Tensor


@dataclass(frozen=True, slots=True)
class Assignments:
    """``counts`` int64 [E]: tokens of each expert; ``rooms``: the same rounded up."""

    counts: torch.Tensor
    rooms: Sequence[int]
    _tokens: Sequence[torch.Tensor]
    _index: Sequence[torch.Tensor]
    _weights: Sequence[torch.Tensor]

    def of(self, expert: int) -> ExpertRows:
        """The tokens that chose ``expert``."""
        return ExpertRows(self._tokens[expert], self._index[expert], self._weights[expert])


def assign(ids: torch.Tensor, weights: torch.Tensor, experts: int, padding: int = ROW_PADDING) -> Assignments:
    """Group the choices ``ids`` int64 [T, k], no expert twice in a row, with ``weights`` fp32 [T, k], by expert; each
    group padded to a multiple of ``padding``."""
    flat = ids.flatten()
    order = torch.argsort(flat, stable=True)  # grouped by expert, tokens ascending
    counts = torch.bincount(flat, minlength=experts)
    sizes: list[int] = counts.tolist()
    rooms = [padded(size, padding) for size in sizes]
    gaps = [room - size for room, size in zip(rooms, sizes, strict=True)]  # behind each group
    shift = torch.tensor([0, *accumulate(gaps)][:-1], device=flat.device)  # of each group: the gaps before it
    place = torch.arange(len(order), device=flat.device) + shift[flat[order]]
    tokens = order // ids.shape[1]
    index = torch.zeros(sum(rooms), dtype=torch.int64, device=flat.device)
    index[place] = tokens
    scale = torch.zeros(sum(rooms), device=flat.device)
    scale[place] = weights.flatten()[order]
    return Assignments(counts, rooms, tokens.split(sizes), index.split(rooms), scale.split(rooms))
