"""Every family through the engine: its logits are transformers', and neither streaming its weights nor a device with
memory of its own changes a bit.

Prompts reach beyond every sliding window (24 to 37 tokens) and beyond the original context (64) of the families whose
rope is scaled, so that masks and scaled frequencies count.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from engine_runs import ON_SIM, random_prompts, run_engine
from equality import assert_matches_transformers, assert_same_bits
from tiny_models import FAMILIES, tiny_checkpoint

LENGTHS = (3, 30, 70, 131)
TOKENS = 4
STREAMED = {"resident_bytes": 0, "ring_bytes": 1 << 20}

# family and configuration: the corners of routing, and one KV head under many query heads
CORNERS: dict[str, tuple[str, dict[str, Any]]] = {
    "160 experts, one chosen": ("qwen3_moe", {"num_experts": 160, "num_experts_per_tok": 1}),
    "160 experts, eight chosen": ("qwen3_moe", {"num_experts": 160, "num_experts_per_tok": 8}),
    "8 experts, all chosen": ("qwen3_moe", {"num_experts": 8, "num_experts_per_tok": 8}),
    "one expert chosen, weights as the softmax has them": ("olmoe", {"num_experts": 16, "num_experts_per_tok": 1}),
    "160 experts in 8 groups": (
        "deepseek_v3",
        {"n_routed_experts": 160, "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4},
    ),
    "one KV head": ("qwen3_moe", {"num_key_value_heads": 1}),
    "one KV head with sinks and windows": ("gpt_oss", {"num_key_value_heads": 1}),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_family(family: str, tmp_path: Path) -> None:
    check(tmp_path, tiny_checkpoint(family, tmp_path))


@pytest.mark.parametrize("corner", CORNERS)
def test_corner(corner: str, tmp_path: Path) -> None:
    family, overrides = CORNERS[corner]
    check(tmp_path, tiny_checkpoint(family, tmp_path, num_hidden_layers=2, **overrides))


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "granitemoe"])
def test_experts_stacked_in_one_tensor(family: str, tmp_path: Path) -> None:
    check(tmp_path, tiny_checkpoint(family, tmp_path, num_hidden_layers=2, experts="stacked", shards=2))


def check(path: Path, reference: Any) -> None:
    prompts = random_prompts(LENGTHS)
    resident = run_engine(path, prompts, TOKENS, keep_logits=True, threads=1)
    assert resident.plan.all_resident
    assert_matches_transformers(reference, prompts, resident)
    streamed = run_engine(path, prompts, TOKENS, keep_logits=True, threads=1, token_budget=96, **STREAMED)
    assert not streamed.plan.all_resident
    assert_same_bits(resident, streamed)
    assert_same_bits(resident, run_engine(path, prompts, TOKENS, keep_logits=True, threads=1, **ON_SIM))
