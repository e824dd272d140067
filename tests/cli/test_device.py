"""``--device`` and ``--vram`` as a user meets them, on the simulated device: the same answers as on the CPU, budgets
that are kept and shown, and what does not fit said with both budgets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from make_checkpoint import Shape, write_checkpoint
from stub_job import read_records, write_lines
from tiny_models import tiny_checkpoint
from tiny_tokenizers import train_byte_level, write_directory

from batchgen_lite import LLM
from batchgen_lite.cli.app import run
from batchgen_lite.errors import BudgetError, UsageError

MIB = 1 << 20
SHAPE = Shape(layers=2, hidden=256, heads=4, kv_heads=2, head_dim=64, experts=32, top_k=2, width=256, vocab=400)
"""Of 26 MiB, so that budgets of a few MiB decide what stays where."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    tiny_checkpoint("qwen3_moe", path, vocab_size=431)
    return write_directory(path, train_byte_level())


def test_answers_are_those_of_the_cpu(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [{"prompt": "why? " * n, "max_tokens": 8, "temperature": 0} for n in range(1, 9)]
    prompts = write_lines(tmp_path / "prompts.jsonl", *lines)
    answers = []
    for device in (["cpu"], ["sim", "--vram", "16MiB"]):
        output = tmp_path / f"{device[0]}.jsonl"
        flags = ["--model", str(model), "--input", str(prompts), "--output", str(output), "--progress", "json"]
        assert run(["generate", *flags, "--device", *device]) == 0
        answers.append(read_records(output))
    assert answers[0] == answers[1]
    summary = capsys.readouterr().err.splitlines()[-1]
    figures = json.loads(summary)
    assert 0 < figures["peak_vram_bytes"] <= figures["vram_budget_bytes"] == 16 * MIB


def test_a_job_goes_on_with_the_device_that_it_began_with(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = write_lines(tmp_path / "prompts.jsonl", *[{"prompt": "x", "max_tokens": 2, "ignore_eos": True}] * 3)
    flags = ["generate", "--model", str(model), "--input", str(prompts)]
    assert run([*flags, "--device", "cpu", "--limit", "1"]) == 0
    assert run([*flags, "--device", "sim", "--resume"]) == 2
    assert 'engine.device: was "cpu", is "sim"' in capsys.readouterr().err


def test_the_library_takes_a_device(model: Path) -> None:
    answers = []
    for options in ({"device": "cpu"}, {"device": "sim", "vram": "16MiB"}):
        with LLM(model, seed=3, **options) as llm:  # type: ignore[arg-type]
            answers.append([result.text for result in llm.generate(["a", "why?"], {"max_tokens": 6})])
    assert answers[0] == answers[1]
    with pytest.raises(UsageError, match="is for a device with memory of its own"):
        LLM(model, device="cpu", vram="1GiB")


@pytest.fixture(scope="module")
def streamed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("streamed")
    write_checkpoint(path, SHAPE)
    return path


@pytest.fixture
def job(tmp_path: Path) -> Path:
    lines = [{"token_ids": list(range(300, 310 + n)), "max_tokens": 20} for n in range(12)]
    return write_lines(tmp_path / "prompts.jsonl", *lines)


def plan(capsys: pytest.CaptureFixture[str], model: Path, job: Path, *flags: str) -> dict[str, Any]:
    code = run(["plan", "--model", str(model), "--input", str(job), "--device", "sim", "--json", *flags])
    out = capsys.readouterr().out
    assert code == 0, out
    found: dict[str, Any] = json.loads(out)
    return found


def test_a_plan_divides_both_budgets(capsys: pytest.CaptureFixture[str], streamed: Path, job: Path) -> None:
    small = plan(capsys, streamed, job, "--vram", "16MiB")
    large = plan(capsys, streamed, job, "--vram", "256MiB")
    for found, vram in ((small, 16 * MIB), (large, 256 * MIB)):
        assert found["vram_bytes"] == vram
        assert sum(found["device_memory"].values()) <= vram
        assert sum(found["memory"].values()) <= found["ram_bytes"]
    assert small["device_memory"]["residents"] < large["device_memory"]["residents"]
    assert small["memory"]["residents"] > large["memory"]["residents"] == 0
    assert run(["plan", "--model", str(streamed), "--input", str(job), "--device", "sim", "--vram", "16MiB"]) == 0
    words = capsys.readouterr().out
    assert "stay on the device" in words
    assert "to the device in each sweep" in words
    assert "/s assumed" in words
    for found in (small, large):
        seconds = found["link"]["bytes_per_sweep"] / found["rates"]["link_bytes_per_second"]
        assert found["link"]["seconds_per_sweep"] == pytest.approx(seconds, abs=1e-4)
    assert large["link"]["bytes_per_sweep"] < small["link"]["bytes_per_sweep"]


def test_too_little_of_either_says_both(capsys: pytest.CaptureFixture[str], streamed: Path, job: Path) -> None:
    flags = ["plan", "--model", str(streamed), "--input", str(job), "--device", "sim"]
    assert run([*flags, "--vram", "1MiB"]) == BudgetError.exit_code
    error = capsys.readouterr().err
    assert "--vram 1MiB is too small" in error
    assert "--ram is enough" in error
    assert run([*flags, "--vram", "1MiB", "--ram", "1MiB"]) == BudgetError.exit_code
    error = capsys.readouterr().err
    assert "--vram 1MiB is too small" in error
    assert "--ram 1MiB is too small" in error
