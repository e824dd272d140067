"""Experts side by side: bit for bit what one after the other gives, whatever goes wrong."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_runs import random_prompts, run_engine
from equality import assert_same_bits
from tiny_models import tiny_checkpoint

from batchgen_lite.kernels.products import USES_ONEDNN
from batchgen_lite.offload.tiles import Tile
from batchgen_lite.runtime.cpu_experts import SideBySide
from batchgen_lite.runtime.cpu_ffn import CpuFFN

pytestmark = pytest.mark.skipif(not USES_ONEDNN, reason="without oneDNN's products nothing runs side by side here")

PROMPTS = random_prompts((1, 9, 33, 64, 65, 130, 40, 17))
STREAMED = {"resident_bytes": 0, "ring_bytes": 1 << 20}
TOKENS = 12


@pytest.fixture
def shares(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Experts computed by the engine's own thread, and by others, from now on."""
    counts = {"alone": 0, "beside": 0}
    original = CpuFFN.__init__

    def count(self: CpuFFN, *args: Any) -> None:
        beside = threading.current_thread().name.startswith("experts")
        counts["beside" if beside else "alone"] += 1
        original(self, *args)

    monkeypatch.setattr(CpuFFN, "__init__", count)
    return counts


@pytest.mark.parametrize("memory", [{}, STREAMED], ids=["resident", "streamed"])
@pytest.mark.parametrize("threads", [2, 3])
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "qwen2_moe", "deepseek_v3"])
def test_bits_are_those_of_one_expert_after_the_other(
    family: str, threads: int, memory: dict[str, Any], tmp_path: Path, shares: dict[str, int]
) -> None:
    tiny_checkpoint(family, tmp_path)
    one = run_engine(tmp_path, PROMPTS, TOKENS, keep_logits=True, threads=1)
    assert shares["beside"] == 0
    beside = run_engine(tmp_path, PROMPTS, TOKENS, keep_logits=True, threads=threads, **memory)
    assert shares["beside"] > 0
    assert_same_bits(one, beside)


@pytest.mark.parametrize("most", [16, 32])
def test_experts_of_more_rows_than_there_is_memory_for_are_computed_by_all_cores(
    most: int, tmp_path: Path, shares: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_checkpoint("qwen3_moe", tmp_path)
    one = run_engine(tmp_path, PROMPTS, TOKENS, keep_logits=True, threads=1)
    before = shares["alone"]
    original = SideBySide._bytes
    monkeypatch.setattr(SideBySide, "_bytes", lambda self, rows: original(self, rows) if rows <= most else 1 << 40)
    mixed = run_engine(tmp_path, PROMPTS, TOKENS, keep_logits=True, threads=2, **STREAMED)
    assert shares["beside"] > 0
    assert shares["alone"] > before
    assert_same_bits(one, mixed)


def test_without_memory_for_any_all_cores_compute_each(
    tmp_path: Path, shares: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_checkpoint("qwen3_moe", tmp_path)
    monkeypatch.setattr(SideBySide, "_bytes", lambda self, rows: 1 << 40)
    run_engine(tmp_path, PROMPTS, TOKENS, threads=2)
    assert shares["beside"] == 0


@pytest.mark.parametrize("nth", [1, 7])
def test_an_error_on_a_worker_ends_the_sweep_as_one_of_its_own_does(
    nth: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_checkpoint("qwen3_moe", tmp_path)
    usual = run_engine(tmp_path, PROMPTS, TOKENS, keep_logits=True, threads=2, **STREAMED)
    original, left = CpuFFN.feed, [nth]
    lock = threading.Lock()

    def feed(self: CpuFFN, tile: Tile, parts: Sequence[torch.Tensor]) -> None:
        if threading.current_thread().name.startswith("experts"):
            with lock:
                left[0] -= 1
                failing = left[0] == 0
            if failing:
                raise MemoryError("the operating system refuses memory")
        original(self, tile, parts)

    monkeypatch.setattr(CpuFFN, "feed", feed)
    again = run_engine(tmp_path, PROMPTS, TOKENS, keep_logits=True, threads=2, **STREAMED)
    assert left[0] < 0
    assert again.summary.extra["sweeps retried"].startswith("1")  # with half as many tokens, as for any MemoryError
    assert_same_bits(usual, again)
