"""KV caches of other dtypes than the checkpoint's: how far they are off, and that a row's bits are still its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_runs import Result, random_prompts, run_engine
from equality import assert_same_bits
from tiny_models import tiny_checkpoint

FAMILIES = ("llama", "qwen3_moe", "deepseek_v2", "gpt_oss")
LENGTHS = (1, 9, 64, 65, 130, 200)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {family: tmp_path_factory.mktemp(family) for family in FAMILIES}
    for family, path in made.items():
        tiny_checkpoint(family, path)
    return made


def relative_errors(got: Result, exact: Result) -> list[float]:
    """|difference| / |logits| of every row's first token, in the Euclidean norm."""
    return [float((got.logits[row] - logits).norm() / logits.norm()) for row, logits in exact.logits.items()]


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_off_by_what_rounding_explains(
    family: str, models: dict[str, Path], record_property: Callable[[str, object], None]
) -> None:
    """A row of D values with its largest at 2 to 3 deviations, in steps of largest / 127, is off by 0.5 % (root mean
    square), bf16 by 0.1 %, fp16 by 0.014 %; three layers of random weights, a router's choice or a softmax's sharpness
    make several times that of it. Real models, whose errors average out over more channels, are nearer."""
    prompts = random_prompts(LENGTHS)
    exact = run_engine(models[family], prompts, 1, keep_logits=True)
    for dtype, typical in (("int8", 0.02), ("bfloat16", 0.01), ("float16", 0.001)):
        got = run_engine(models[family], prompts, 1, keep_logits=True, kv_dtype=dtype)
        errors = sorted(relative_errors(got, exact))
        record_property(f"{family}, {dtype} KV", f"median {errors[len(errors) // 2]:.2%}, largest {errors[-1]:.2%}")
        assert errors[0] > 0, "the option did nothing"
        assert errors[len(errors) // 2] < typical
        assert errors[-1] < 5 * typical


CIRCUMSTANCES: dict[str, dict[str, Any]] = {
    "prompts cut into odd chunks": {"token_budget": 29, "slice_tokens": 8},
    "one sequence at a time": {"max_sequences": 1, "resident_bytes": 0, "ring_bytes": 1 << 20},
    "eviction and computing again": {"kv_pages": 7, "token_budget": 64},
}


@pytest.mark.parametrize("circumstance", CIRCUMSTANCES)
@pytest.mark.parametrize("family", ["llama", "deepseek_v2", "gpt_oss"])
def test_bits_with_int8_do_not_depend_on(circumstance: str, family: str, models: dict[str, Path]) -> None:
    lengths, tokens = ((60, 61, 62, 50, 120), 70) if "eviction" in circumstance else ((1, 9, 64, 65, 130, 40), 4)
    prompts = random_prompts(lengths)
    usual = run_engine(models[family], prompts, tokens, keep_logits=True, kv_dtype="int8")
    unusual = run_engine(
        models[family], prompts, tokens, keep_logits=True, kv_dtype="int8", **CIRCUMSTANCES[circumstance]
    )
    if "eviction" in circumstance:
        assert "0 evictions" not in unusual.summary.extra["batch"]
    assert_same_bits(usual, unusual)


def test_int8_takes_a_good_quarter_of_float32s_memory(models: dict[str, Path]) -> None:
    """The tiny model's heads are 20 channels wide, so a scale is a sixth of them; of 128 it is a thirty-second."""
    prompts = random_prompts([100] * 4)
    held = [
        dict(run_engine(models["llama"], prompts, 1, kv_dtype=dtype, kv_pages=8).plan.accounts)["KV cache"]
        for dtype in ("float32", "int8")
    ]
    assert held[1] == pytest.approx(held[0] * 24 / 80)


def test_a_row_that_is_not_finite_fails_alone(models: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its NaN goes through int8 pages, and does not stay in them for the next row."""
    from batchgen_lite.offload.kv import KVPool

    write = KVPool.write

    def poisoned(pool: KVPool, layer: int, page: torch.Tensor, slot: torch.Tensor, *kv: torch.Tensor) -> None:
        key, value = kv
        bad = (page == 0).view(-1, 1, 1) & (torch.tensor(layer == 0)) & torch.tensor(not healed)
        write(pool, layer, page, slot, key, value.masked_fill(bad, float("nan")))
        if bool(bad.any()):
            healed.append(True)

    healed: list[bool] = []
    prompts = random_prompts([30, 29, 28])
    clean = run_engine(models["llama"], prompts, 3, kv_dtype="int8", kv_pages=2, max_sequences=1)
    monkeypatch.setattr(KVPool, "write", poisoned)
    got = run_engine(models["llama"], prompts, 3, kv_dtype="int8", kv_pages=2, max_sequences=1)
    assert list(got.errors) == [0]
    assert got.tokens[1:] == clean.tokens[1:]
