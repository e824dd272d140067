"""A process that has allowed less precise products elsewhere gets full ones from us, and keeps its setting."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from engine_runs import random_prompts, run_engine
from equality import assert_same_bits
from tiny_models import tiny_checkpoint

from batchgen_lite.kernels import products
from batchgen_lite.kernels.precision import full_precision


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    yield
    torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize("allowed", ["high", "medium"])
def test_a_run_is_the_same_whatever_the_process_allows(
    allowed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_checkpoint("qwen3_moe", tmp_path)
    prompts = random_prompts((3, 40))
    truth = run_engine(tmp_path, prompts, 3, keep_logits=True)
    seen = set()
    one = products._PRODUCT

    def watched(weights: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        seen.add(torch.backends.mkldnn.matmul.fp32_precision)
        return one(weights, rows)

    monkeypatch.setattr(products, "_PRODUCT", watched)
    torch.set_float32_matmul_precision(allowed)
    assert_same_bits(run_engine(tmp_path, prompts, 3, keep_logits=True), truth)
    assert seen == {"ieee"}
    assert torch.get_float32_matmul_precision() == allowed


def test_the_setting_returns_even_after_an_error() -> None:
    torch.set_float32_matmul_precision("medium")
    settings = (torch.backends.mkldnn.matmul, torch.backends.cuda.matmul)
    before = [setting.fp32_precision for setting in settings]

    def fails() -> None:
        with full_precision():
            assert [setting.fp32_precision for setting in settings] == ["ieee", "ieee"]
            raise RuntimeError("something")

    with pytest.raises(RuntimeError, match="something"):
        fails()
    assert [setting.fp32_precision for setting in settings] == before
    assert "ieee" not in before
