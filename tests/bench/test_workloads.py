"""The measured jobs have the lengths that their descriptions say, the same ones every time."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from workloads import WORKLOADS, log_normal, prompts_of, rows_of, write_prompts


def test_chat_lengths() -> None:
    rows = rows_of(WORKLOADS["chat"])
    assert len(rows) == 512
    for values, median in (([r.prompt_tokens for r in rows], 48), ([r.new_tokens for r in rows], 16)):
        assert np.median(values) == pytest.approx(median, rel=0.1)
        assert np.quantile(values, 0.99) / np.median(values) == pytest.approx(4, rel=0.25)


def test_log_normal_ratio_in_the_limit() -> None:
    values = log_normal(np.random.default_rng(0), 200_000, 1000)
    assert np.quantile(values, 0.99) / np.median(values) == pytest.approx(4, rel=0.02)


def test_uniform_lengths() -> None:
    rows = rows_of(WORKLOADS["uniform"])
    lengths = [row.prompt_tokens for row in rows]
    assert len(rows) == 512
    assert (min(lengths), max(lengths)) == (16, 128)
    assert {row.new_tokens for row in rows} == {32}


def test_prefill_lengths() -> None:
    rows = rows_of(WORKLOADS["prefill"])
    assert len(rows) == 128
    assert np.mean([row.prompt_tokens for row in rows]) == pytest.approx(500, rel=0.03)
    assert {row.new_tokens for row in rows} == {4}


def test_four_stragglers_are_twenty_times_as_long() -> None:
    rows = rows_of(WORKLOADS["stragglers"])
    usual = np.median([row.prompt_tokens for row in rows])
    longer = [row for row in rows if row.new_tokens > 16]
    assert len(rows) == 128
    assert len(longer) == 4
    assert all(row.new_tokens == 320 and row.prompt_tokens >= 15 * usual for row in longer)


@pytest.mark.parametrize("name", sorted(WORKLOADS))
def test_written_jobs_match_their_rows(name: str, tmp_path: Path) -> None:
    workload = WORKLOADS[name]
    count = write_prompts(tmp_path / "one.jsonl", workload, 400)
    write_prompts(tmp_path / "two.jsonl", workload, 400)
    assert (tmp_path / "one.jsonl").read_bytes() == (tmp_path / "two.jsonl").read_bytes()
    lines = [json.loads(line) for line in (tmp_path / "one.jsonl").read_text().splitlines()]
    rows = rows_of(workload)
    assert len(lines) == len(rows) == count
    assert len({line["custom_id"] for line in lines}) == count
    for line, row in zip(lines, rows, strict=True):
        assert (len(line["token_ids"]), line["max_tokens"]) == (row.prompt_tokens, row.new_tokens)
        assert line["ignore_eos"] is True
        assert all(300 <= token < 400 for token in line["token_ids"])


def test_limit_keeps_the_spread() -> None:
    rows = rows_of(WORKLOADS["chat"], limit=64)
    assert len(rows) == 64
    assert len(list(prompts_of(WORKLOADS["chat"], 1000, limit=64))) == 64
    assert max(row.prompt_tokens for row in rows) > 2 * np.median([row.prompt_tokens for row in rows])
