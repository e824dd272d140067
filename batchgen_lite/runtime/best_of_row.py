"""The best of a row of logits, found by comparisons alone, in few passes over the vocabulary.

Exact, so it does not matter how they are found; only how long it takes. For a row of 152,000 on one core torch's own
``topk``, ``argmax`` and ``nonzero`` take 0.35 to 0.45 ms each; a maximum takes 0.02, and numpy's ``argmax`` and
``flatnonzero`` 0.06.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

_BLOCK = 128
_WORTHWHILE = 4  # times as many blocks as values looked for, from which looking at their maxima first pays


def finite_rows(logits: Tensor) -> list[bool]:
    """Whether all of each row of ``logits`` [n, V] is finite: NaN and infinities show in the extremes."""
    low, high = logits.amin(dim=1), logits.amax(dim=1)
    return (torch.isfinite(low) & torch.isfinite(high)).tolist()


def best_of_rows(logits: Tensor) -> list[int]:
    """The first of the greatest of each row of ``logits`` [n, V]; anything for a row with NaN."""
    if logits.device.type != "cpu":
        return torch.argmax(logits, dim=1).tolist()
    best: list[int] = logits.numpy().argmax(axis=1).tolist()
    return best


def kth_best(values: Tensor, count: int) -> float:
    """The ``count``-th greatest of ``values`` fp32 [n], contiguous, on the CPU, without NaN; 1 <= count <= n."""
    blocks = values.numel() // _BLOCK
    if blocks < _WORTHWHILE * count:
        return float(torch.topk(values, count, sorted=False).values.amin())
    # The maxima of ``count`` blocks are ``count`` values, so the one we look for is not below the least of them; and
    # whatever is not below it lies in a block whose maximum is not below it either.
    whole = values[: blocks * _BLOCK].view(blocks, _BLOCK)
    maxima = whole.amax(dim=1)
    floor = torch.topk(maxima, count, sorted=False).values.amin()
    candidates = torch.cat([whole[maxima >= floor].flatten(), values[blocks * _BLOCK :]])
    return float(torch.topk(candidates, count, sorted=False).values.amin())


def at_least(values: Tensor, limit: float) -> Tensor:
    """Ascending indices int64 of ``values`` fp32 [n], on the CPU, that are not below ``limit`` (rounded to fp32)."""
    return torch.from_numpy(np.flatnonzero(values.numpy() >= np.float32(limit)))
