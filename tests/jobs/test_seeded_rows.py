"""A seeded row's answer is its own: alone, among hundreds, in another order, under another budget, after a resume."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from tiny_models import tiny_checkpoint
from tiny_tokenizers import train_byte_level, write_directory

from batchgen_lite import LLM, Result
from batchgen_lite.offload.budget_process import resident_bytes

ROW: dict[str, Any] = {
    "prompt": "The capital of France is",
    "seed": 1234,
    "max_tokens": 12,
    "temperature": 1.2,
    "top_p": 0.95,
    "ignore_eos": True,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    tiny_checkpoint("olmoe", path, vocab_size=431)
    return write_directory(path, train_byte_level())


def others(count: int) -> list[dict[str, Any]]:
    rng = random.Random(3)
    return [
        {"prompt": "why " * rng.randint(1, 30), "max_tokens": rng.randint(1, 5), "temperature": rng.choice([0, 0.7, 2])}
        for _ in range(count)
    ]


def answer(model: Path, rows: list[dict[str, Any]], **options: Any) -> Result:
    with LLM(model, seed=1, **options) as llm:
        results = llm.generate(rows)
    assert all(result.error is None for result in results)
    return results[rows.index(ROW)]


def test_a_seeded_row_is_the_same_in_any_company(model: Path) -> None:
    alone = answer(model, [ROW])
    assert len(alone.token_ids) == 12
    crowd = others(500)
    assert answer(model, [*crowd[:250], ROW, *crowd[250:]]).token_ids == alone.token_ids
    tight = resident_bytes() + (80 << 20)  # this process, which has loaded more than ours, and little beside
    assert answer(model, [ROW, *reversed(crowd[:60])], ram=tight, threads=1).token_ids == alone.token_ids
    assert answer(model, [{**ROW, "seed": 1235}, ROW]).token_ids == alone.token_ids


def test_another_seed_gives_another_answer(model: Path) -> None:
    with LLM(model, seed=1) as llm:
        results = llm.generate([ROW, {**ROW, "seed": 1235}, {**ROW, "seed": 1236}])
    assert len({result.token_ids for result in results}) > 1
