"""Behind the last attention only rows that want logits go on: with the bits of a run in which all do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from engine_runs import ON_SIM, random_prompts, run_engine
from equality import assert_same_bits
from tiny_models import tiny_checkpoint

from batchgen_lite.runtime import sweep
from batchgen_lite.runtime.cpu_operations import CpuOperations
from batchgen_lite.runtime.cpu_slices import CpuSlice
from batchgen_lite.runtime.slice_state import Slice
from batchgen_lite.runtime.slices import run_slice

PROMPTS = random_prompts((1, 9, 70, 33, 130))
TOKENS = 4
CUT = {"slice_tokens": 16, "token_budget": 48}  # slices within prompts, and prompts over several sweeps


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[str, int], list[int]]:
    """Rows that modules were run on, by kind and layer, from now on."""
    seen: dict[tuple[str, int], list[int]] = {}
    original = CpuOperations.module

    def module(self: CpuOperations, kind: str, layer: int, x: Any, tokens: int) -> Any:
        seen.setdefault((kind, layer), []).append(tokens)
        return original(self, kind, layer, x, tokens)

    monkeypatch.setattr(CpuOperations, "module", module)
    return seen


def everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on all rows go to the end."""
    monkeypatch.setattr(
        sweep, "run_slice", lambda skeleton, slice_, *, narrow: run_slice(skeleton, slice_, narrow=False)
    )


@pytest.mark.parametrize("memory", [{}, ON_SIM], ids=["cpu", "sim"])
@pytest.mark.parametrize("cut", [{}, CUT], ids=["whole", "cut"])
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "gpt_oss", "llama"])
def test_bits_are_those_of_all_rows_going_on(
    family: str, cut: dict[str, Any], memory: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_checkpoint(family, tmp_path)
    narrow = run_engine(tmp_path, PROMPTS, TOKENS, keep_logits=True, **cut, **memory)
    everything(monkeypatch)
    assert_same_bits(run_engine(tmp_path, PROMPTS, TOKENS, keep_logits=True, **cut, **memory), narrow)


def test_the_last_layer_runs_on_rows_that_want_logits(tmp_path: Path, rows: dict[tuple[str, int], list[int]]) -> None:
    tiny_checkpoint("qwen3_moe", tmp_path)
    run_engine(tmp_path, PROMPTS, TOKENS)
    computed, sampled = sum(map(len, PROMPTS)) + len(PROMPTS) * (TOKENS - 1), len(PROMPTS) * TOKENS
    last = max(layer for _, layer in rows)
    assert last > 0
    totals = {key: sum(counts) for key, counts in rows.items()}
    assert totals == {
        (kind, layer): sampled if layer == last and kind in ("out", "experts") else computed for kind, layer in totals
    }


def test_a_sweep_of_which_nobody_wants_logits_goes_to_its_end(
    tmp_path: Path, rows: dict[tuple[str, int], list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_checkpoint("qwen3_moe", tmp_path)
    prompt = random_prompts((100,))
    cut = run_engine(tmp_path, prompt, TOKENS, keep_logits=True, token_budget=48)
    last = max(layer for _, layer in rows)
    assert rows["experts", last] == [48, 48, *[1] * TOKENS]
    assert rows["experts", 0] == [48, 48, 4, *[1] * (TOKENS - 1)]
    assert_same_bits(run_engine(tmp_path, prompt, TOKENS, keep_logits=True), cut)


def test_a_slice_that_nobody_wants_logits_of_ends_behind_the_last_attention(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_checkpoint("qwen3_moe", tmp_path)
    begun: list[list[int]] = []  # of each sweep the rows of its slices that want logits
    finals: list[int] = []
    slice_, final = CpuOperations.slice, CpuSlice.final

    def begins(self: CpuOperations, part: Slice) -> Any:
        if part.start == 0:
            begun.append([])
        begun[-1].append(len(part.logit_rows))
        return slice_(self, part)

    def ends(self: CpuSlice) -> Any:
        finals.append(len(self._part.logit_rows))
        return final(self)

    monkeypatch.setattr(CpuOperations, "slice", begins)
    monkeypatch.setattr(CpuSlice, "final", ends)
    # Each span in a slice of its own; the second sweep ends the first prompt and begins the other one.
    prompts = random_prompts((100, 50))
    cut = run_engine(tmp_path, prompts, TOKENS, keep_logits=True, token_budget=64, slice_tokens=1)
    assert any(min(sweep) == 0 < max(sweep) for sweep in begun)
    assert finals == [rows for sweep in begun for rows in sweep if rows or not any(sweep)]
    assert_same_bits(run_engine(tmp_path, prompts, TOKENS, keep_logits=True), cut)
