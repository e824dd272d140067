"""The command with the real engine on a real (tiny) checkpoint: kill -9 and resume, Ctrl-C, and what cannot work."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from stub_job import command, read_records, write_lines
from tiny_models import change_json, tiny_checkpoint
from tiny_tokenizers import train_byte_level, write_directory

DATE = ("--date", "2026-01-31")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Large enough that a sweep streams and a run lasts a moment; small enough for a test."""
    path = tmp_path_factory.mktemp("model")
    tiny_checkpoint("qwen3_moe", path, vocab_size=431, num_hidden_layers=4, shards=2)
    return write_directory(path, train_byte_level())


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    """Every eighth row is long: when the short ones are done, a hundred sweeps are still to come, so that a signal
    sent then always comes before the end."""
    lines = [
        {
            "custom_id": f"row {i}",
            "messages": [{"role": "user", "content": "why? " * (1 + i % 30)}],
            "max_tokens": 30 if i % 8 else 150,
            "ignore_eos": True,
        }
        for i in range(48)
    ]
    return write_lines(tmp_path / "prompts.jsonl", *lines)


def generate(model: Path, prompts: Path, output: Path, *more: str) -> list[str]:
    return command("generate", "--model", model, "--input", prompts, "--output", output, "--progress", "json", *more)


def run(arguments: list[str]) -> subprocess.CompletedProcess[str]:
    result = subprocess.run(arguments, capture_output=True, text=True, timeout=120, check=False)
    assert "Traceback" not in result.stderr
    return result


def kill_when(arguments: list[str], output: Path, enough: int, number: signal.Signals) -> tuple[int, float]:
    """Start, wait until ``enough`` bytes of finished rows are on disk, send the signal; (exit code, seconds to end)."""
    partial = output.with_name(output.name + ".partial")
    with subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True) as running:
        while running.poll() is None and not (partial.exists() and partial.stat().st_size >= enough):
            os.sched_yield()
        running.send_signal(number)
        sent = time.monotonic()
        _, errors = running.communicate()
        assert "Traceback" not in errors
        return running.returncode, time.monotonic() - sent


@pytest.mark.parametrize("sampling", [("--temperature", "0"), ("--temperature", "1.3", "--seed", "11")])
def test_kill_9_and_resume_give_the_bytes_of_an_uninterrupted_run(
    model: Path, prompts: Path, tmp_path: Path, sampling: tuple[str, ...]
) -> None:
    whole, broken = tmp_path / "whole.jsonl", tmp_path / "broken.jsonl"
    assert run(generate(model, prompts, whole, *sampling, *DATE)).returncode == 0
    assert len(read_records(whole)) == 48
    code, _ = kill_when(generate(model, prompts, broken, *sampling, *DATE), broken, 500, signal.SIGKILL)
    assert code == -signal.SIGKILL
    finished = broken.with_name("broken.jsonl.partial").read_bytes().count(b"\n")
    assert 0 < finished < 48
    resumed = run(generate(model, prompts, broken, *sampling, *DATE, "--resume"))
    assert resumed.returncode == 0
    assert broken.read_bytes() == whole.read_bytes()
    summary = json.loads(resumed.stderr.splitlines()[-1])
    everything = sum(record["usage"]["completion_tokens"] for record in read_records(whole))
    assert summary["tokens_decoded"] < everything


def test_ctrl_c_within_a_sweep_ends_soon_and_saves_what_is_done(model: Path, prompts: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    code, seconds = kill_when(generate(model, prompts, output, *DATE), output, 300, signal.SIGINT)
    assert code == 130
    assert seconds < 3
    assert not output.exists()
    assert 0 < output.with_name("out.jsonl.partial").read_bytes().count(b"\n") < 48
    assert run(generate(model, prompts, output, *DATE, "--resume")).returncode == 0
    assert len(read_records(output)) == 48


SEARCHING = """
import sys, time
from batchgen_lite.cli import main
from batchgen_lite.runtime import build
from batchgen_lite.runtime.plan_search import SearchStopped

def search(*_, stopped):
    print("searching", file=sys.stderr, flush=True)
    while not stopped():
        time.sleep(0.01)
    raise SearchStopped

build.best_plan = search
main(sys.argv[1:])
"""
"""The command, with a search for a plan that ends only when it is told to."""


def test_ctrl_c_while_a_plan_is_searched_for_ends_the_search(model: Path, tmp_path: Path) -> None:
    lines = [{"prompt": f"number {i}", "max_tokens": 4, "ignore_eos": True} for i in range(8)]
    prompts, output = write_lines(tmp_path / "prompts.jsonl", *lines), tmp_path / "out.jsonl"
    flags = generate(model, prompts, output, *DATE)
    arguments = [sys.executable, "-P", "-c", SEARCHING, *flags[flags.index("generate") :]]
    with subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True) as running:
        assert running.stderr is not None
        missing = {"searching", '"event": "progress"'}  # the display goes on meanwhile
        while missing and (line := running.stderr.readline()):
            missing -= {words for words in missing if words in line}
        running.send_signal(signal.SIGINT)
        rest = running.stderr.read()
    assert not missing
    assert running.returncode == 130
    assert "Traceback" not in rest
    assert json.loads(rest.splitlines()[-1])["left"] == 8
    assert run(generate(model, prompts, output, *DATE, "--resume")).returncode == 0
    assert len(read_records(output)) == 8


def test_the_summary_counts_what_was_read(model: Path, prompts: Path, tmp_path: Path) -> None:
    result = run(generate(model, prompts, tmp_path / "out.jsonl", "--temperature", "0"))
    summary = json.loads(result.stderr.splitlines()[-1])
    assert summary["tokens_decoded"] > 0
    assert 0 < summary["peak_ram_bytes"] <= summary["ram_budget_bytes"]
    assert summary["bytes_read"] > 0


def test_one_bad_line_leaves_the_others_alone(model: Path, tmp_path: Path) -> None:
    good = [{"prompt": f"number {i}", "max_tokens": 8, "temperature": 0} for i in range(6)]
    mixed = write_lines(tmp_path / "mixed.jsonl", *good[:3], b'{"prompt": ', *good[3:])
    alone = write_lines(tmp_path / "alone.jsonl", *good)
    assert run(generate(model, mixed, tmp_path / "a.jsonl")).returncode == 1
    assert run(generate(model, alone, tmp_path / "b.jsonl")).returncode == 0
    with_error = read_records(tmp_path / "a.jsonl")
    assert with_error[3]["error"]["code"] == "invalid_json"
    texts = [record["text"] for record in with_error if record["error"] is None]
    assert texts == [record["text"] for record in read_records(tmp_path / "b.jsonl")]


def copied(model: Path, to: Path) -> Path:
    return Path(shutil.copytree(model, to))


def break_architecture(model: Path) -> None:
    change_json(model / "config.json", {"architectures": ["MambaForCausalLM"], "model_type": "mamba"})


def remove_shard(model: Path) -> None:
    sorted(model.glob("model-*.safetensors"))[1].unlink()


def truncate_shard(model: Path) -> None:
    shard = sorted(model.glob("model-*.safetensors"))[0]
    os.truncate(shard, shard.stat().st_size - 100)


FAULTS: dict[str, tuple[Any, int, str]] = {
    "unknown architecture": (break_architecture, 3, "Mamba"),
    "missing shard": (remove_shard, 3, "model-00002"),
    "truncated shard": (truncate_shard, 3, "model-00001"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_model_that_cannot_work_is_refused(fault: str, model: Path, prompts: Path, tmp_path: Path) -> None:
    damage, code, named = FAULTS[fault]
    broken = copied(model, tmp_path / "broken")
    damage(broken)
    result = run(generate(broken, prompts, tmp_path / "out.jsonl"))
    assert result.returncode == code
    assert named in result.stderr


def test_a_budget_too_small_names_the_smallest_that_works(model: Path, tmp_path: Path) -> None:
    """It holds the longest prompt and a token more. A row that outgrows it ends for want of KV, with a record that says
    so, unless the rounding to a MiB happens to leave it a page."""
    output = tmp_path / "out.jsonl"
    lines = [{"custom_id": str(i), "prompt": "why? " * (1 + i % 30), "max_tokens": 1} for i in range(48)]
    prompts = write_lines(tmp_path / "prompts.jsonl", *lines)
    refused = run(generate(model, prompts, output, "--ram", "100MiB"))
    assert refused.returncode == 4
    sizes = [int(number) for number in re.findall(r"(\d+) ?MiB", refused.stderr)]
    smallest = f"{max(sizes)}MiB"
    accepted = run(generate(model, prompts, output, "--ram", smallest, "--resume"))
    assert accepted.returncode == 0, accepted.stderr


def test_an_output_that_exists_is_left_alone(model: Path, prompts: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    output.write_text("precious\n")
    result = run(generate(model, prompts, output))
    assert result.returncode == 2
    assert "--resume" in result.stderr
    assert "--overwrite" in result.stderr
    assert output.read_text() == "precious\n"


def test_min_tokens_keeps_a_row_from_ending_by_itself(model: Path, tmp_path: Path) -> None:
    every_other = list(range(0, 431, 2))  # ids that end a row: nearly every row would end at once
    lines = [
        {"prompt": f"number {i}", "max_tokens": 12, "min_tokens": 9, "stop_token_ids": every_other, "temperature": 0}
        for i in range(6)
    ]
    output = tmp_path / "out.jsonl"
    assert run(generate(model, write_lines(tmp_path / "in.jsonl", *lines), output)).returncode == 0
    for record in read_records(output):
        assert record["usage"]["completion_tokens"] > 9
