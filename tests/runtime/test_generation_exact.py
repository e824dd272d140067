"""Our tokens and logits against transformers, and ours against ours bit for bit, whatever the circumstances."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from engine_runs import ON_SIM, random_prompts, run_engine
from equality import assert_matches_transformers, assert_same_bits
from tiny_models import tiny_checkpoint

from batchgen_lite.kernels.router.reference import route
from batchgen_lite.runtime import cpu_modules

FAMILIES = ("llama", "qwen3", "mixtral", "olmoe", "qwen3_moe")
LENGTHS = (1, 2, 3, 5, 7, 9, 11, 17, 33, 40, 50, 60, 64, 65, 100, 127, 128, 129, 150, 180, 200)
TOKENS = 6
STREAMED = {"resident_bytes": 0, "ring_bytes": 1 << 20}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Any]]:
    made = {}
    for family in FAMILIES:
        path = tmp_path_factory.mktemp(family)
        made[family] = (path, tiny_checkpoint(family, path))
    return made


@pytest.mark.parametrize("family", FAMILIES)
def test_matches_transformers_resident_and_streamed(family: str, models: dict[str, tuple[Path, Any]]) -> None:
    path, reference = models[family]
    prompts = random_prompts(LENGTHS)
    resident = run_engine(path, prompts, TOKENS, keep_logits=True)
    assert resident.plan.all_resident
    assert_matches_transformers(reference, prompts, resident)
    streamed = run_engine(path, prompts, TOKENS, keep_logits=True, **STREAMED)
    assert not streamed.plan.all_resident
    assert_same_bits(resident, streamed)


CIRCUMSTANCES: dict[str, dict[str, Any]] = {
    "half the tiles resident": {"resident_bytes": 600_000, "ring_bytes": 1 << 20},
    "one sequence at a time": {"max_sequences": 1, **STREAMED},
    "slices of 16 tokens": {"slice_tokens": 16},
    "prompts cut into chunks": {"token_budget": 32, **STREAMED},
    "prompts cut into odd chunks": {"token_budget": 29, "slice_tokens": 8},
    "one compute thread": {"threads": 1},
    "two compute threads": {"threads": 2},
    "eviction and computing again": {"kv_pages": 8, "token_budget": 64},
    "a device that holds the model": {"device": "sim"},
    "a device that everything streams to": ON_SIM,
    "a device with some tiles there and some on the host": {
        **ON_SIM,
        "resident_bytes": 300_000,
        "device_resident_bytes": 300_000,
        "token_budget": 32,
        "slice_tokens": 16,
    },
}


@pytest.mark.parametrize("circumstance", CIRCUMSTANCES)
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_bits_do_not_depend_on(circumstance: str, family: str, models: dict[str, tuple[Path, Any]]) -> None:
    path, _ = models[family]
    lengths, tokens = (1, 9, 33, 64, 65, 130, 40, 17), TOKENS
    if "eviction" in circumstance:
        lengths, tokens = (60, 61, 62, 63, 50, 120), 100
    prompts = random_prompts(lengths)
    usual = run_engine(path, prompts, tokens, keep_logits=True)
    unusual = run_engine(path, prompts, tokens, keep_logits=True, **CIRCUMSTANCES[circumstance])
    if "eviction" in circumstance:
        assert "0 evictions" not in unusual.summary.extra["batch"]
    assert_same_bits(usual, unusual)


@pytest.mark.parametrize("family", ["qwen3", "mixtral"])
def test_bits_do_not_depend_on_the_order_of_prompts(family: str, models: dict[str, tuple[Path, Any]]) -> None:
    path, _ = models[family]
    prompts = random_prompts((1, 9, 33, 64, 65, 130))
    forward = run_engine(path, prompts, TOKENS, keep_logits=True)
    backward = run_engine(path, prompts[::-1], TOKENS, keep_logits=True)
    alone = run_engine(path, prompts[3:4], TOKENS, keep_logits=True)
    for row in range(len(prompts)):
        assert torch.equal(forward.logits[row], backward.logits[len(prompts) - 1 - row]), row
    assert torch.equal(forward.logits[3], alone.logits[0])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_checkpoints_keep_their_kv_dtype_and_their_bits(dtype: str, tmp_path: Path) -> None:
    tiny_checkpoint("qwen3_moe", tmp_path, dtype=dtype, shards=2)
    prompts = random_prompts((3, 70, 20, 128))
    resident = run_engine(tmp_path, prompts, TOKENS, keep_logits=True)
    streamed = run_engine(tmp_path, prompts, TOKENS, keep_logits=True, token_budget=40, **STREAMED)
    assert_same_bits(resident, streamed)


def test_every_routed_expert_is_read_once_a_sweep(
    models: dict[str, tuple[Path, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, reference = models["qwen3_moe"]
    everything = reference.config.num_hidden_layers * reference.config.num_experts
    routed = count_routed_experts(monkeypatch)
    summary = run_engine(path, random_prompts([30] * 24), 8, **STREAMED).summary
    assert summary.expert_reads == sum(routed)
    assert summary.expert_reads > 0.9 * summary.sweeps * everything  # a batch that is worth reading ahead for
    assert 0 < summary.unrouted_expert_reads <= 0.11 * summary.expert_reads


def test_small_batches_wait_for_the_router_and_read_nothing_else(
    models: dict[str, tuple[Path, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, reference = models["qwen3_moe"]
    everything = reference.config.num_hidden_layers * reference.config.num_experts
    routed = count_routed_experts(monkeypatch)
    summary = run_engine(path, random_prompts([4]), 8, **STREAMED).summary
    assert summary.expert_reads == sum(routed) < 0.9 * summary.sweeps * everything
    assert summary.unrouted_expert_reads == 0


def count_routed_experts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Filled with the number of distinct experts chosen, one entry per layer and sweep, as the router said."""
    counts: list[int] = []

    def counting(*arguments: Any) -> Any:
        ids, weights = route(*arguments)
        counts.append(len(ids.unique()))
        return ids, weights

    monkeypatch.setattr(cpu_modules, "route", counting)
    return counts
