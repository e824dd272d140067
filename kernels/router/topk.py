"""Expert choice on the device: scores, groups, top-k and weights of a token in one program.

The rules are those of ``reference.py`` (RouterSpec); ties go to the lower id. Importing this module imports triton.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from batchgen_lite.errors import UnsupportedError
from batchgen_lite.kernels.config import Config, lookup
from batchgen_lite.kernels.launch import Launch, OperandError, capability_of, power_of_two, require
from batchgen_lite.models.spec import RouterSpec

# Below every score, and below that: finite, because -inf would make NaN of differences.
CLOSED: tl.constexpr = tl.constexpr(-1.0e30)
TAKEN: tl.constexpr = tl.constexpr(-1.0e37)


@triton.jit
def topk_kernel(
    logits,
    correction_bias,
    ids,
    weights,
    experts,
    logits_stride,
    scaling,
    SCORING: tl.constexpr,
    RENORMALISE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    GROUPS: tl.constexpr,
    OPEN_GROUPS: tl.constexpr,
    TOP2: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_G: tl.constexpr,
):
    """Grid (tokens,). The experts of a token are a [groups, experts of a group] tile.

    Must move: T * (4 * E + 12 * k) bytes. Must do: about T * E * (k + 10) operations. Bound by memory and launch time.
    """
    token = tl.program_id(0).to(tl.int64)
    size = experts // GROUPS
    group = tl.arange(0, BLOCK_G)[:, None]
    member = tl.arange(0, BLOCK_E)[None, :]
    expert = group * size + member
    real = (group < GROUPS) & (member < size)
    logit = tl.load(logits + token * logits_stride + expert, mask=real, other=CLOSED)
    if SCORING == "softmax":
        peak = tl.max(tl.max(tl.where(logit == logit, logit, CLOSED), 1), 0)
        raised = tl.where(real, tl.exp(logit - peak), 0.0)
        score = raised / tl.sum(tl.sum(raised, 1), 0)
    elif SCORING == "sigmoid":
        score = 1.0 / (1.0 + tl.exp(-tl.where(real, logit, 0.0)))
    else:
        score = logit
    choice = score
    if HAS_BIAS:
        choice += tl.load(correction_bias + expert, mask=real, other=0.0)
    # NaN would make the search below find nothing; a row with NaN logits shall stay in bounds and show NaN weights.
    choice = tl.where(real, tl.where(choice == choice, choice, CLOSED), TAKEN)
    if OPEN_GROUPS < GROUPS:
        choice = _close_groups(choice, group, member, real, SCORING, GROUPS, OPEN_GROUPS, TOP2)
    rank = tl.arange(0, BLOCK_K)
    chosen = tl.zeros([BLOCK_K], dtype=tl.int32)
    weight = tl.full([BLOCK_K], CLOSED, dtype=tl.float32)
    total = 0.0
    for place in tl.static_range(TOP_K):
        best = tl.max(tl.max(choice, 1), 0)
        winner = tl.min(tl.min(tl.where((choice == best) & real, expert, 1 << 30), 1), 0)
        here = expert == winner
        value = tl.sum(tl.sum(tl.where(here & real, score, 0.0), 1), 0)
        choice = tl.where(here, TAKEN, choice)
        chosen = tl.where(rank == place, winner, chosen)
        weight = tl.where(rank == place, value, weight)
        total += value
    if SCORING == "softmax_topk":
        weight = tl.where(rank < TOP_K, tl.exp(weight - tl.max(weight, 0)), 0.0)
        weight = weight / tl.sum(weight, 0)
    if RENORMALISE:
        if SCORING == "sigmoid":
            total += 1e-20
        elif SCORING == "softmax_topk":
            total = tl.sum(weight, 0)
        weight = weight / total
    pointer = token * TOP_K + rank
    tl.store(ids + pointer, chosen, mask=rank < TOP_K)
    tl.store(weights + pointer, weight * scaling, mask=rank < TOP_K)


@triton.jit
def _close_groups(
    choice, group, member, real,
    SCORING: tl.constexpr, GROUPS: tl.constexpr, OPEN_GROUPS: tl.constexpr, TOP2: tl.constexpr,
):  # fmt: skip
    """Take experts outside the OPEN_GROUPS best groups out of the choice (DeepSeek-V2 section 2.2, V3 section 2.1).

    A group's score is its best expert's or the sum of its two best; equal groups: the lower one first.
    """
    best = tl.max(choice, 1)  # [BLOCK_G]
    if TOP2:
        where = tl.min(tl.where(choice == best[:, None], member, 1 << 30), 1)
        rest = tl.where(member == where[:, None], TAKEN, choice)
        best += tl.max(rest, 1)
    column = tl.reshape(group, [group.shape[0]])
    best = tl.where(column < GROUPS, best, TAKEN)
    opened = column < 0
    for _ in tl.static_range(OPEN_GROUPS):
        top = tl.max(tl.where(opened, TAKEN, best), 0)
        winner = tl.min(tl.where((best == top) & (opened == 0) & (column < GROUPS), column, 1 << 30), 0)
        opened = opened | (column == winner)
    closed = CLOSED if SCORING == "sigmoid" else 0.0
    return tl.where(real & (opened[:, None] == 0), closed, choice)


def topk(
    logits: torch.Tensor,
    spec: RouterSpec,
    ids: torch.Tensor,
    weights: torch.Tensor,
    *,
    correction_bias: torch.Tensor | None = None,
    config: Config | None = None,
) -> Launch:
    """Prepare the launch; ``.run()`` queues it.

    ``logits`` fp32 [T, E]; ``correction_bias`` fp32 [E]; ``ids`` int32 [T, k] receives the chosen experts in descending
    order of the score that chose them, ``weights`` fp32 [T, k] their weights. Raises OperandError, and UnsupportedError
    for a rule that is not implemented.
    """
    device = logits.device
    require("logits", logits, (None, spec.num_experts), torch.float32, device)
    require("ids", ids, (logits.shape[0], spec.top_k), torch.int32, device, dense=2)
    require("weights", weights, (logits.shape[0], spec.top_k), torch.float32, device, dense=2)
    if correction_bias is not None:
        require("correction_bias", correction_bias, (spec.num_experts,), torch.float32, device)
    if spec.scoring not in ("softmax", "softmax_topk", "sigmoid"):
        raise UnsupportedError(f"router scoring {spec.scoring!r}: softmax, softmax_topk and sigmoid are implemented")
    if spec.group_score not in ("max", "top2"):
        raise UnsupportedError(f"router group score {spec.group_score!r}: max and top2 are implemented")
    groups = spec.num_groups if spec.topk_group < spec.num_groups else 1
    if spec.num_experts % groups or not 0 < spec.top_k <= spec.num_experts:
        raise OperandError(
            f"top {spec.top_k} of {spec.num_experts} experts in {groups} groups: groups must be equal, k at most E"
        )
    config = config or lookup("topk", capability=capability_of(device), dtype="fp32", n=spec.num_experts)
    arguments = {
        "logits": logits,
        "correction_bias": correction_bias,
        "ids": ids,
        "weights": weights,
        "experts": spec.num_experts,
        "logits_stride": logits.stride(0),
        "scaling": float(spec.scaling),
        "SCORING": spec.scoring,
        "RENORMALISE": spec.renormalise,
        "HAS_BIAS": correction_bias is not None,
        "GROUPS": groups,
        "OPEN_GROUPS": min(spec.topk_group, groups),
        "TOP2": spec.group_score == "top2",
        "TOP_K": spec.top_k,
        "BLOCK_K": power_of_two(spec.top_k),
        "BLOCK_E": power_of_two(spec.num_experts // groups),
        "BLOCK_G": power_of_two(groups),
    }
    return Launch(topk_kernel, (logits.shape[0],), arguments, config.num_warps, config.num_stages)
