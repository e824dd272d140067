"""Peaks and times of a command, seen from outside."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from page_cache import drop_from_cache
from watch_rss import OVER_LIMIT, QUICK, status_field, watch

SCRIPT = Path(__file__).resolve().parents[2] / "bench" / "watch_rss.py"
MIB = 1 << 20


def allocate(size: int) -> list[str]:
    """A process that gives its memory back and then lives on for some looks: a fast machine starts and ends Python
    between two of them."""
    steps = f"block = bytearray({size})\nblock[::4096] = b'x' * len(block[::4096])\ndel block"
    return [sys.executable, "-c", f"import time\n{steps}\ntime.sleep({10 * QUICK})"]


def test_the_peak_is_seen_after_it_was_given_back() -> None:
    plain = watch([sys.executable, "-c", "pass"])
    seen = watch(allocate(200 * MIB))
    assert 195 * MIB < seen.peak_rss - plain.peak_rss < 215 * MIB
    assert seen.code == 0
    assert seen.wall_seconds > 0
    assert seen.peak_tree >= seen.peak_rss


def test_children_count_in_the_tree_only(tmp_path: Path) -> None:
    ready, gate = tmp_path / "ready", tmp_path / "gate"
    os.mkfifo(gate)
    child = f"block = bytearray({150 * MIB}); open({str(ready)!r}, 'w').close(); open({str(gate)!r}).read()"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}], check=True)"
    looks = 0

    def look(elapsed: float) -> None:
        """Let the child go once it has been measured with its memory in hand."""
        nonlocal looks
        looks += ready.exists()
        if looks == 2:
            gate.open("w").close()

    seen = watch([sys.executable, "-c", parent], on_look=look)
    assert seen.code == 0
    assert seen.peak_tree > 150 * MIB
    assert seen.peak_rss < 100 * MIB


def test_the_exit_code_is_passed_on() -> None:
    assert watch([sys.executable, "-c", "raise SystemExit(7)"]).code == 7


def test_a_command_over_time_is_killed() -> None:
    assert watch(["sleep", "60"], timeout=0.1).code == -9


def test_status_of_a_process_that_is_gone() -> None:
    process = subprocess.Popen([sys.executable, "-c", "pass"])
    process.wait()
    assert status_field(process.pid, "VmHWM") == 0


def test_own_peak_agrees_with_psutil() -> None:
    assert status_field(os.getpid(), "VmRSS") == pytest.approx(psutil.Process().memory_info().rss, rel=0.1)


def test_dropping_from_the_cache_counts_all_files_below(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    for name in ("one", "inner/two"):
        (tmp_path / name).write_bytes(bytes(MIB))
    assert drop_from_cache([tmp_path]) == 2 * MIB
    assert (tmp_path / "one").read_bytes() == bytes(MIB)


@pytest.mark.parametrize(("limit", "code"), [("1GiB", 0), ("1MiB", OVER_LIMIT)])
def test_command_line(limit: str, code: int, tmp_path: Path) -> None:
    report = tmp_path / "seen.json"
    command = [sys.executable, str(SCRIPT), "--limit", limit, "--json", str(report), "--", *allocate(MIB)]
    # As users start it: a script finds the modules beside it, which make's PYTHONSAFEPATH would rule out.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == code
    assert json.loads(report.read_text())["code"] == 0
    assert "peak RSS" in done.stderr
