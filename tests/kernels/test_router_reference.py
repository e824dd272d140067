"""The router equals transformers' routers, and a row's result depends on that row only."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_models import tiny_model

from batchgen_lite.errors import UnsupportedError
from batchgen_lite.kernels.router.reference import route, stable_topk
from batchgen_lite.models.spec import RouterSpec
from batchgen_lite.models.spec_from_config import spec_from_config

_CASES: list[tuple[str, dict[str, Any]]] = [
    ("mixtral", {}),
    ("mixtral", {"num_local_experts": 5, "num_experts_per_tok": 1}),
    ("olmoe", {}),
    ("olmoe", {"norm_topk_prob": True, "num_experts": 64, "num_experts_per_tok": 8}),
    ("qwen2_moe", {"num_experts": 60}),
    ("qwen3_moe", {"num_experts": 128}),
    ("qwen3_moe", {"num_experts": 8, "num_experts_per_tok": 8}),
    ("gpt_oss", {"num_local_experts": 32}),
    ("deepseek_v2", {"n_routed_experts": 160, "n_group": 8, "topk_group": 3, "num_experts_per_tok": 6}),
    ("deepseek_v2_lite", {"n_routed_experts": 64, "num_experts_per_tok": 6}),
    ("deepseek_v3", {"n_routed_experts": 256, "n_group": 8, "topk_group": 4, "num_experts_per_tok": 8}),
    ("deepseek_v3", {"norm_topk_prob": False}),
    ("glm4_moe", {"n_routed_experts": 128, "num_experts_per_tok": 8}),
    ("glm4_moe_lite", {}),
    ("granitemoe", {}),
]


def _router(model: Any) -> Any:
    layer = model.model.layers[-1]
    block = layer.block_sparse_moe if hasattr(layer, "block_sparse_moe") else layer.mlp
    return block.router if hasattr(block, "router") else block.gate


@pytest.mark.parametrize(("family", "overrides"), _CASES)
def test_equals_transformers(family: str, overrides: dict[str, Any]) -> None:
    first = {} if family in ("glm4_moe_lite", "olmoe") else {"first_k_dense_replace": 0}
    model = tiny_model(family, num_hidden_layers=2, **{**first, **overrides})
    spec = spec_from_config({**model.config.to_dict(), "dtype": "float32"}).layers[-1].router
    assert spec is not None
    router = _router(model)
    hidden = torch.randn(200, model.config.hidden_size, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        logits, expected_weights, expected_ids = router(hidden)
    bias = getattr(router, "e_score_correction_bias", None)
    assert spec.correction_bias == (bias is not None)
    ids, weights = route(logits, spec, bias)
    assert ids.dtype == torch.int64
    assert ids.shape == weights.shape == (200, spec.top_k)
    # Compared as a dense [T, E] table: transformers leaves the order of the chosen open.
    ours, theirs = torch.zeros(200, spec.num_experts), torch.zeros(200, spec.num_experts)
    ours.scatter_(1, ids, weights)
    theirs.scatter_(1, expected_ids, expected_weights)
    assert torch.equal(ours != 0, theirs != 0)
    torch.testing.assert_close(ours, theirs, rtol=2e-6, atol=1e-7)
    if family in ("mixtral", "olmoe", "qwen2_moe", "qwen3_moe", "gpt_oss", "granitemoe"):
        assert torch.equal(ids, expected_ids)


_SPECS = [
    RouterSpec(num_experts=60, top_k=4),
    RouterSpec(num_experts=24, top_k=8, renormalise=True),
    RouterSpec(num_experts=10, top_k=4, scoring="softmax_topk", bias=True),
    RouterSpec(num_experts=12, top_k=3, num_groups=3, topk_group=2, scaling=1.7),
    RouterSpec(
        num_experts=24,
        top_k=5,
        scoring="sigmoid",
        renormalise=True,
        scaling=2.5,
        num_groups=4,
        topk_group=2,
        group_score="top2",
        correction_bias=True,
    ),
]


@pytest.mark.parametrize("spec", _SPECS)
def test_a_row_does_not_depend_on_the_others(spec: RouterSpec) -> None:
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(997, spec.num_experts, generator=generator) * 3
    logits[::5] = logits[::5].round()  # plenty of ties
    bias = torch.randn(spec.num_experts, generator=generator) * 0.1 if spec.correction_bias else None
    ids, weights = route(logits, spec, bias)
    for start, stop in ((0, 1), (3, 4), (5, 12), (100, 117), (501, 997), (996, 997)):
        part_ids, part_weights = route(logits[start:stop].clone(), spec, bias)
        assert torch.equal(part_ids, ids[start:stop])
        assert torch.equal(part_weights, weights[start:stop])
    order = torch.randperm(997, generator=generator)
    shuffled_ids, shuffled_weights = route(logits[order], spec, bias)
    assert torch.equal(shuffled_ids, ids[order])
    assert torch.equal(shuffled_weights, weights[order])


def test_ties_go_to_the_lower_id_in_descending_score_order() -> None:
    logits = torch.tensor(
        [[0.0, 2.0, 1.0, 2.0, 1.0, 1.0], [1.0, 1.0, 1.0, 1.0, 1.0, 1.0], [5.0, 4.0, 3.0, 2.0, 1.0, 0.0]]
    )
    ids, weights = route(logits, RouterSpec(num_experts=6, top_k=4, renormalise=True))
    assert ids.tolist() == [[1, 3, 2, 4], [0, 1, 2, 3], [0, 1, 2, 3]]
    assert torch.equal(weights[1], torch.full((4,), 0.25))
    torch.testing.assert_close(weights.sum(dim=1), torch.ones(3))


def test_groups_that_tie_open_the_lower_one() -> None:
    spec = RouterSpec(num_experts=6, top_k=2, num_groups=3, topk_group=1)
    ids, _ = route(torch.zeros(2, 6), spec)
    assert ids.tolist() == [[0, 1], [0, 1]]


def test_closed_groups_are_never_chosen_even_with_negative_scores() -> None:
    spec = RouterSpec(4, 2, scoring="sigmoid", num_groups=2, topk_group=1, group_score="top2", correction_bias=True)
    bias = torch.tensor([-3.0, -3.0, -4.0, -4.0])
    ids, _ = route(torch.zeros(3, 4), spec, bias)
    assert ids.tolist() == [[0, 1]] * 3


def test_not_a_number_stays_within_its_row() -> None:
    logits = torch.randn(4, 8, generator=torch.Generator().manual_seed(3))
    clean_ids, clean_weights = route(logits, RouterSpec(num_experts=8, top_k=2))
    logits[2] = float("nan")
    ids, weights = route(logits, RouterSpec(num_experts=8, top_k=2))
    others = torch.tensor([0, 1, 3])
    assert torch.equal(ids[others], clean_ids[others])
    assert torch.equal(weights[others], clean_weights[others])
    assert ((ids >= 0) & (ids < 8)).all()


@pytest.mark.parametrize(("rows", "k"), [(0, 2), (1, 6), (3, 1)])
def test_topk_edges(rows: int, k: int) -> None:
    scores = torch.randn(rows, 6, generator=torch.Generator().manual_seed(4))
    assert torch.equal(stable_topk(scores, k), scores.sort(dim=1, descending=True, stable=True).indices[:, :k])


def test_unknown_options_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="sparsemixer"):
        route(torch.zeros(1, 4), RouterSpec(num_experts=4, top_k=1, scoring="sparsemixer"))
    with pytest.raises(UnsupportedError, match="mean"):
        route(torch.zeros(1, 4), RouterSpec(4, 1, num_groups=2, topk_group=1, group_score="mean"))
