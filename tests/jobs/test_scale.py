"""Hundreds of thousands of rows: memory stays flat, no step is quadratic."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

import psutil
from stub_job import command, environment

ROWS = 200_000


@dataclass
class Cost:
    start_seconds: float  # CPU time until the engine starts
    cpu_seconds: float
    peak_bytes: int


def cost_of(tmp_path: Path, rows: int) -> Cost:
    """One whole run over ``rows`` one-line prompts, seen from outside. CPU time: other processes do not count."""
    source, output = tmp_path / f"{rows}.jsonl", tmp_path / f"{rows}.out"
    with source.open("w") as file:
        for row in range(rows):
            file.write(
                json.dumps({"custom_id": f"row-{row}", "prompt": f"Say something about the number {row}."}) + "\n"
            )
    arguments = command("generate", "--input", source, "--output", output, "--max-tokens", "1", "--progress", "json")
    with subprocess.Popen(arguments, env=environment({"batch": 256}), stderr=subprocess.PIPE) as running:
        assert running.stderr is not None
        while b'"event": "plan"' not in running.stderr.readline():
            assert running.poll() is None
        times = psutil.Process(running.pid).cpu_times()
        running.stderr.read()
        _, status, usage = os.wait4(running.pid, 0)
        running.returncode = os.waitstatus_to_exitcode(status)
    assert running.returncode == 0
    with output.open("rb") as file:
        assert sum(1 for _ in file) == rows
    return Cost(times.user + times.system, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024)


def test_two_hundred_thousand_rows(tmp_path: Path) -> None:
    start, small, large = cost_of(tmp_path, 1), cost_of(tmp_path, ROWS // 20), cost_of(tmp_path, ROWS)
    assert large.peak_bytes - start.peak_bytes < 100e6
    assert large.start_seconds < 60
    # Twenty times the rows, twenty times the time; a quadratic step would make it four hundred.
    assert large.cpu_seconds - start.cpu_seconds < 40 * (small.cpu_seconds - start.cpu_seconds)
