"""kill -9 at random moments, then --resume: the bytes of an uninterrupted run, and no journalled token made twice."""

from __future__ import annotations

import json
import random
import subprocess
from pathlib import Path
from typing import Any

import pytest
from stub_job import command, environment, run_command, write_lines

KILLS = {"greedy-flat": 7, "seeded-flat": 6, "greedy-openai": 6, "seeded-openai": 6}  # 25 in all
STUB = {"batch": 5, "step_seconds": 0.0005}
DATE = ("--date", "2026-01-31")


def lines_of(setup: str) -> list[dict[str, Any]]:
    sampling: dict[str, Any] = {"temperature": 0} if setup.startswith("greedy") else {"temperature": 1.5}
    prompts = [{"prompt": f"question {i}", "max_tokens": 30, **sampling} for i in range(40)]
    if setup.endswith("flat"):
        return [{"custom_id": f"row {i}", **line} for i, line in enumerate(prompts)]
    frame = {"method": "POST", "url": "/v1/completions"}
    return [{"custom_id": f"row {i}", **frame, "body": line | {"logprobs": 1}} for i, line in enumerate(prompts)]


def written(output: Path) -> int:
    """Bytes of work on disk."""
    files = [output.with_name(output.name + suffix) for suffix in (".partial", ".journal")]
    return sum(path.stat().st_size for path in files if path.exists())


def run_and_kill(arguments: list[str | Path], output: Path, enough: int) -> bool:
    """Start a run and kill it as soon as so many bytes of work are on disk. False if it was done before."""
    with subprocess.Popen(command(*arguments), env=environment(STUB), stderr=subprocess.DEVNULL) as running:
        while running.poll() is None:
            if written(output) >= enough:
                running.kill()
                return running.wait() != 0
        return running.returncode != 0


def on_disk(output: Path) -> int:
    """Tokens that need not be generated again: those of finished records and of the journal."""
    status = json.loads(run_command("status", output, "--json").stdout)
    tokens = int(status["live_tokens"])
    for line in output.with_name(output.name + ".partial").read_bytes().split(b"\n")[: status["done"]]:
        record = json.loads(line)
        tokens += (record.get("usage") or record["response"]["body"]["usage"])["completion_tokens"]
    return tokens


def decoded(stderr: bytes) -> int:
    return int(json.loads(stderr.splitlines()[-1])["tokens_decoded"])


@pytest.mark.parametrize("setup", KILLS)
def test_killed_at_random_moments(tmp_path: Path, setup: str) -> None:
    source = write_lines(tmp_path / "in.jsonl", *lines_of(setup))
    seed = ("--seed", "11") if setup.startswith("seeded") else ()
    fixed: list[str | Path] = ["--input", source, *seed, *DATE, "--progress", "json"]
    whole, output = tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    uninterrupted = run_command("generate", *fixed, "--output", whole, stub=STUB)
    assert uninterrupted.returncode == 0
    arguments: list[str | Path] = ["generate", *fixed, "--output", output, "--resume"]
    total = 2 * whole.stat().st_size  # about what records and journal come to
    draw = random.Random(setup)
    moments = sorted(draw.randrange(total * 2 // 3) for _ in range(KILLS[setup]))
    killed = [run_and_kill(arguments, output, moment) for moment in moments]
    assert killed == [True] * KILLS[setup]
    saved = on_disk(output)
    last = run_command(*arguments, stub=STUB)
    assert last.returncode == 0, last.stderr
    assert output.read_bytes() == whole.read_bytes()
    assert saved > 0
    assert decoded(last.stderr) + saved == decoded(uninterrupted.stderr)
