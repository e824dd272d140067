"""Expert choice in torch: the reference of the router kernel, and the production path without one.

A row's result must not depend on the rows beside it, bit for bit. Two torch habits stand against that, and shape
this file: ``torch.sigmoid`` computes the tail of a buffer with other instructions than its middle (``exp`` does
not), and ``topk`` breaks ties as it pleases.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from batchgen_lite.errors import UnsupportedError

if TYPE_CHECKING:
    from batchgen_lite.models.spec import RouterSpec


def route(
    logits: torch.Tensor, spec: RouterSpec, correction_bias: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Chosen experts and their weights.

    ``logits`` fp32 [T, E]; ``correction_bias`` fp32 [E] where the spec has one. Returns ids int64 [T, k] in
    descending order of the score that chose them (ties: the lower id first) and weights fp32 [T, k].
    """
    scores = _scores(logits, spec)  # [T, E]
    choice = scores if correction_bias is None else scores + correction_bias
    if spec.topk_group < spec.num_groups:
        # Sigmoid scores plus a bias can be negative, so there the closed groups must lie below everything.
        closed = float("-inf") if spec.scoring == "sigmoid" else 0.0
        choice = choice.masked_fill(~_open_groups(choice, spec), closed)
    ids = stable_topk(choice, spec.top_k)  # [T, k]
    weights = scores.gather(1, ids)
    if spec.scoring == "softmax_topk":
        weights = torch.softmax(weights, dim=-1)
    if spec.renormalise:
        total = _row_sum(weights)
        weights = weights / (total + 1e-20 if spec.scoring == "sigmoid" else total)
    return ids, weights * spec.scaling if spec.scaling != 1.0 else weights


def _scores(logits: torch.Tensor, spec: RouterSpec) -> torch.Tensor:
    if spec.scoring == "softmax":
        return torch.softmax(logits, dim=-1)
    if spec.scoring == "softmax_topk":
        return logits
    if spec.scoring == "sigmoid":
        return 1.0 / (1.0 + torch.exp(-logits))
    raise UnsupportedError(
        f"router scoring {spec.scoring!r} is not implemented; softmax, softmax_topk and sigmoid are."
    )


def _open_groups(choice: torch.Tensor, spec: RouterSpec) -> torch.Tensor:
    """Which experts stay eligible, bool [T, E]: those of the ``topk_group`` best groups (DeepSeek-V2, section 2.2)."""
    rows, experts = choice.shape
    grouped = choice.view(rows, spec.num_groups, experts // spec.num_groups)
    if spec.group_score == "max":
        group_scores = grouped.amax(dim=-1)  # [T, groups]
    elif spec.group_score == "top2":
        best = grouped.topk(2, dim=-1).values
        group_scores = best[..., 0] + best[..., 1]
    else:
        raise UnsupportedError(f"router group score {spec.group_score!r} is not implemented; max and top2 are.")
    opened = torch.zeros_like(group_scores, dtype=torch.bool)
    opened.scatter_(1, stable_topk(group_scores, spec.topk_group), True)
    return opened[..., None].expand_as(grouped).reshape(rows, experts)


def stable_topk(scores: torch.Tensor, k: int) -> torch.Tensor:
    """Ids int64 [T, k] of the k largest scores of each row, descending, ties by lower id; NaN counts as largest."""
    width = min(k + 1, scores.shape[1])
    values, ids = scores.topk(width, dim=-1)
    ids = ids[:, :k].contiguous()
    # Strictly falling values have one order only. All other rows (ties, NaN) are few: sort those stably.
    unclear = ~(values[:, :-1] > values[:, 1:]).all(dim=-1)
    if bool(unclear.any()):
        ids[unclear] = scores[unclear].sort(dim=-1, descending=True, stable=True).indices[:, :k]
    return ids


def _row_sum(weights: torch.Tensor) -> torch.Tensor:
    """The sum over k [T, 1], added left to right: ``sum`` picks its order by the tensor's shape."""
    total = weights[:, :1]
    for column in range(1, weights.shape[1]):
        total = total + weights[:, column : column + 1]
    return total
