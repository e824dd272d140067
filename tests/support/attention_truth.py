"""Attention and its inputs in float64, written from the definition: one query at a time, no pages, no blocks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


def attend(
    query: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
    scale: float,
    window: int | None = None,
    sinks: np.ndarray | None = None,
) -> np.ndarray:
    """``query`` [Hq, D] at the last position of ``keys`` [n, Hkv, D], ``values`` [n, Hkv, Dv]; returns [Hq, Dv]."""
    heads, group = query.shape[0], query.shape[0] // keys.shape[1]
    first = 0 if window is None else max(0, len(keys) - window)
    out = np.zeros((heads, values.shape[2]))
    for head in range(heads):
        scores = keys[first:, head // group] @ query[head] * scale
        weights = np.exp(scores - scores.max())
        total = weights.sum()
        if sinks is not None:
            total += np.exp(sinks[head] - scores.max())
        out[head] = weights @ values[first:, head // group] / total
    return out


@dataclass(frozen=True)
class Sequence:
    """The keys and values of one sequence, [n, Hkv, D] and [n, Hkv, Dv] float64."""

    keys: np.ndarray
    values: np.ndarray
