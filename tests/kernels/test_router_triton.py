"""The router kernel against the float64 rule and the torch reference; sorting assignments by their invariants."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from batchgen_lite.errors import UnsupportedError
from batchgen_lite.kernels.experts.tiles import tile_bound
from batchgen_lite.kernels.launch import OperandError
from batchgen_lite.kernels.router.assign import sort_assignments
from batchgen_lite.kernels.router.reference import route
from batchgen_lite.kernels.router.topk import topk
from batchgen_lite.models.spec import RouterSpec

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
NAN = float("nan")

ROUTERS = [
    pytest.param(RouterSpec(8, 2), id="softmax"),
    pytest.param(RouterSpec(7, 3, renormalise=True), id="softmax-renormalised-odd"),
    pytest.param(RouterSpec(32, 4, scoring="softmax_topk"), id="gpt-oss"),
    pytest.param(RouterSpec(5, 1, scoring="softmax_topk", renormalise=True), id="top-1"),
    pytest.param(RouterSpec(6, 6, scaling=2.5), id="all-experts"),
    pytest.param(RouterSpec(16, 3, num_groups=4, topk_group=2, scaling=16.0), id="deepseek-v2"),
    pytest.param(
        RouterSpec(
            24, 4, scoring="sigmoid", renormalise=True, scaling=2.5, num_groups=3, topk_group=2, group_score="top2",
            correction_bias=True,
        ),
        id="deepseek-v3",
    ),
    pytest.param(RouterSpec(9, 2, scoring="sigmoid", correction_bias=True), id="sigmoid-plain"),
]  # fmt: skip


def run(logits: torch.Tensor, spec: RouterSpec, bias: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.full((logits.shape[0], spec.top_k), -1, dtype=torch.int32, device=DEVICE)
    weights = torch.full((logits.shape[0], spec.top_k), NAN, device=DEVICE)
    topk(logits, spec, ids, weights, correction_bias=bias).run()
    return ids, weights


def by_hand(logits: np.ndarray, spec: RouterSpec, bias: np.ndarray | None) -> tuple[list[int], np.ndarray]:
    """One row, by sorting."""
    raised = np.exp(logits - logits.max())
    scores = {"softmax": raised / raised.sum(), "sigmoid": 1 / (1 + np.exp(-logits)), "softmax_topk": logits}[
        spec.scoring
    ]
    choice = scores if bias is None else scores + bias
    if spec.topk_group < spec.num_groups:
        groups = np.split(choice, spec.num_groups)
        score = [g.max() if spec.group_score == "max" else np.sort(g)[-2:].sum() for g in groups]
        best = sorted(range(spec.num_groups), key=lambda g: (-score[g], g))[: spec.topk_group]
        size = spec.num_experts // spec.num_groups
        closed = -np.inf if spec.scoring == "sigmoid" else 0.0
        choice = np.array([c if e // size in best else closed for e, c in enumerate(choice)])
    ids = sorted(range(spec.num_experts), key=lambda e: (-choice[e], e))[: spec.top_k]
    weights = scores[ids]
    if spec.scoring == "softmax_topk":
        weights = np.exp(weights - weights.max()) / np.exp(weights - weights.max()).sum()
    if spec.renormalise:
        weights = weights / weights.sum()
    return ids, weights * spec.scaling


@pytest.mark.parametrize("spec", ROUTERS)
def test_every_rule(spec: RouterSpec) -> None:
    rng = np.random.default_rng(1)
    logits = torch.from_numpy(rng.standard_normal((6, spec.num_experts)) * 2).float().to(DEVICE)
    bias = torch.from_numpy(rng.standard_normal(spec.num_experts)).float().to(DEVICE) if spec.correction_bias else None
    ids, weights = run(logits, spec, bias)
    for row in range(6):
        raw = None if bias is None else bias.double().cpu().numpy()
        expected, shares = by_hand(logits[row].double().cpu().numpy(), spec, raw)
        assert ids[row].tolist() == expected
        np.testing.assert_allclose(weights[row].double().cpu().numpy(), shares, rtol=3e-6)
    same_ids, same_weights = route(logits.cpu(), spec, None if bias is None else bias.cpu())
    assert torch.equal(ids.cpu().long(), same_ids)
    torch.testing.assert_close(weights.cpu(), same_weights, rtol=3e-6, atol=0)


def test_ties_go_to_the_lower_id() -> None:
    ids, _ = run(torch.tensor([[1.0, 3.0, 3.0, 0.0, 3.0]], device=DEVICE), RouterSpec(5, 4))
    assert ids.tolist() == [[1, 2, 4, 0]]


def test_not_finite_logits_stay_in_bounds_and_show() -> None:
    logits = torch.tensor([[NAN, NAN, NAN, NAN], [0.0, NAN, 1.0, 2.0], [0.0, 1.0, 2.0, 3.0]], device=DEVICE)
    ids, weights = run(logits, RouterSpec(4, 2))
    assert bool(((ids >= 0) & (ids < 4)).all())
    assert [len(set(row)) for row in ids.tolist()] == [2, 2, 2]
    assert bool(weights[0].isnan().all())
    assert not bool(weights[2].isnan().any())


def test_refusals_name_the_rule() -> None:
    logits, ids, weights = torch.zeros(1, 4), torch.zeros(1, 2, dtype=torch.int32), torch.zeros(1, 2)
    with pytest.raises(UnsupportedError, match="sparsemax"):
        topk(logits, RouterSpec(4, 2, scoring="sparsemax"), ids, weights)
    with pytest.raises(OperandError, match="groups must be equal"):
        topk(logits, RouterSpec(4, 2, num_groups=3, topk_group=1), ids, weights)
    with pytest.raises(OperandError, match=r"ids: dtype int64, but int32"):
        topk(logits, RouterSpec(4, 2), ids.long(), weights)


@given(tokens=st.integers(0, 20), experts=st.integers(1, 12), seed=st.integers(0, 1000), data=st.data())
def test_sorting_invariants(tokens: int, experts: int, seed: int, data: st.DataObject) -> None:
    top_k = data.draw(st.integers(1, experts))
    rng = np.random.default_rng(seed)
    chosen = np.array([rng.permutation(experts)[:top_k] for _ in range(tokens)], dtype=np.int32)
    ids = torch.from_numpy(chosen.reshape(tokens, top_k))
    weights = torch.from_numpy(rng.random((tokens, top_k)).astype(np.float32))
    plan = sort_assignments(ids, weights, experts)
    count = tokens * top_k
    assert sorted(plan.order.tolist()) == list(range(count))
    assert plan.offsets.dtype == plan.order.dtype == plan.tokens.dtype == torch.int32
    assert plan.offsets[0] == 0
    assert plan.offsets[-1] == count
    for expert in range(experts):
        flat = plan.order[plan.offsets[expert] : plan.offsets[expert + 1]]
        assert bool((ids.reshape(-1)[flat.long()] == expert).all())
        assert flat.tolist() == sorted(flat.tolist())
    assert torch.equal(plan.tokens, plan.order // top_k)
    assert torch.equal(plan.weights, weights.reshape(-1)[plan.order.long()])


@given(counts=st.lists(st.integers(0, 200), min_size=1, max_size=20), block=st.sampled_from([16, 32, 64]))
def test_tile_bound_covers_any_split_and_is_reached(counts: list[int], block: int) -> None:
    tiles = sum(-(-n // block) for n in counts)
    bound = tile_bound(sum(counts), len(counts), block)
    assert tiles <= bound
    rows, groups = sum(counts), len(counts)
    if rows >= groups:
        # One row in every group but the first leaves most of the last tiles empty.
        worst = [rows - (groups - 1)] + [1] * (groups - 1)
        assert bound == sum(-(-n // block) for n in worst)
