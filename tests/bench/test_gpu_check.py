"""The check prepared for a card runs here without one, every section of it, and finds nothing wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

BENCH = Path(__file__).resolve().parents[2] / "bench"
SECTIONS = {
    "machine", "numbers of kernels", "bits of a row", "models", "a row alone, in 7, in 500", "jobs", "copies and disk",
    "speed of kernels", "GPUDirect Storage",
}  # fmt: skip


def check(tmp_path: Path, *options: str) -> tuple[subprocess.CompletedProcess[str], dict[str, list[dict[str, object]]]]:
    report = tmp_path / "report.json"
    command = [sys.executable, str(BENCH / "gpu_check.py"), "--json", str(report), "--work", str(tmp_path), *options]
    environment = {**os.environ, "PYTHONSAFEPATH": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert report.exists(), done.stderr[-4000:]
    sections: dict[str, list[dict[str, object]]] = json.loads(report.read_text())["sections"]
    return done, sections


def test_a_dry_run_goes_through_every_section(tmp_path: Path) -> None:
    done, sections = check(tmp_path, "--dry-run")
    assert sections.keys() == SECTIONS
    wrong = [(name, line) for name, lines in sections.items() for line in lines if line["good"] is False]
    assert wrong == []
    assert done.returncode == 0
    assert "0 lines are wrong" in done.stdout
    judged = {name for name, lines in sections.items() if any(line["good"] for line in lines)}
    assert judged == {"numbers of kernels", "bits of a row", "models", "a row alone, in 7, in 500"}
    assert not list(tmp_path.glob("gpu-check-*")), "the checkpoints have been removed"


def test_one_failure_hides_nothing_else(tmp_path: Path) -> None:
    """Without a card the real run fails section by section, and says so in every line."""
    done, sections = check(tmp_path, "--only", "kernels")
    assert done.returncode == 1
    assert sections.keys() == {"numbers of kernels", "speed of kernels"}
    assert all(lines[-2]["what"] == "failed" for lines in sections.values())
    assert all("Traceback" in str(lines[-2]["data"]) for lines in sections.values())


def test_sections_that_come_too_late_are_left_out(tmp_path: Path) -> None:
    done, sections = check(tmp_path, "--dry-run", "--minutes", "0", "--only", "bits")
    assert done.returncode == 0
    assert [line["what"] for line in sections["bits of a row"]] == ["not run"]
