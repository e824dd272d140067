"""Jobs and the library over the real engine and a tiny random model: resume in the middle, and engines used again."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from stub_job import write_lines
from tiny_models import tiny_checkpoint
from tiny_tokenizers import train_byte_level, write_directory

from batchgen_lite import LLM
from batchgen_lite.jobs.claim import claim_output
from batchgen_lite.jobs.job import Counts, Job, JobOptions
from batchgen_lite.jobs.model_text import ModelText
from batchgen_lite.runtime.build import build_engine
from batchgen_lite.runtime.interface import Engine, SampledToken
from batchgen_lite.runtime.options import EngineOptions

DATE = "2026-01-31"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    tiny_checkpoint("qwen3_moe", path, vocab_size=422)
    return write_directory(path, train_byte_level())


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[Engine]:
    built = build_engine(model, EngineOptions(threads=1))
    yield built
    built.close()


def lines() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for i in range(6):
        found.append({"custom_id": f"g{i}", "prompt": "the " * (i + 1), "temperature": 0, "max_tokens": 10 + i})
        found.append({"prompt": f"a{i}", "temperature": 1.2, "max_tokens": 12, "logprobs": 2})
        body = {"messages": [{"role": "user", "content": f"hello {i}"}], "max_tokens": 8, "seed": i}
        found.append({"custom_id": f"o{i}", "method": "POST", "url": "/v1/chat/completions", "body": body})
    return found


def run(
    model: Path, engine: Engine, source: Path, output: Path, *, stop_after: int | None = None
) -> tuple[Counts, int]:
    """Counts, and the tokens decoded in this run. ``stop_after``: stop once so many tokens are journalled."""
    job = Job(
        claim_output(str(output), str(source), resume=True),
        JobOptions(str(source), seed=3, date=DATE),
        ModelText(model, name="tiny", date=DATE),
    )

    try:
        job.prepare()
        if stop_after is not None:
            _stop_after(job, engine, stop_after)
        summary = asyncio.run(job.run(engine))
        return job.finish(), summary.tokens_decoded
    finally:
        job.close()


def _stop_after(job: Job, engine: Engine, tokens: int) -> None:
    """As a signal would: in the middle of a sweep's results."""
    assert job.sink is not None
    take, left = job.sink.token, iter(range(tokens, -1, -1))

    def count(row: int, sampled: SampledToken, *, scored: bool) -> None:
        take(row, sampled, scored=scored)
        if next(left, None) == 0:
            engine.request_stop()

    job.sink.token = count  # type: ignore[method-assign]


def test_a_job_stopped_in_the_middle_ends_with_the_same_bytes(model: Path, engine: Engine, tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", *lines(), b"bad")
    whole, output = tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    counts, all_tokens = run(model, engine, source, whole)
    assert (counts.ok, counts.failed) == (18, 1)
    stopped, first = run(model, engine, source, output, stop_after=40)
    assert stopped.left > 0
    _, second = run(model, engine, source, output)
    assert output.read_bytes() == whole.read_bytes()
    assert first > 0
    assert first + second == all_tokens
    assert json.loads(whole.read_bytes().splitlines()[1])["logprobs"][0]["top_logprobs"]


def test_a_stream_left_early_does_not_stop_the_next_run(model: Path) -> None:
    async def leave(llm: LLM) -> None:
        stream = llm.stream(["the quick", "brown fox", "jumps"], {"max_tokens": 20, "ignore_eos": True})
        await anext(stream)
        await stream.aclose()

    with LLM(model, threads=1, seed=1) as llm:
        asyncio.run(leave(llm))
        first = llm.generate(["the quick", "brown"], {"max_tokens": 6})
        assert [result.ok for result in first] == [True, True]
        assert llm.generate(["the quick", "brown"], {"max_tokens": 6}) == first
