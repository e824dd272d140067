from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path
from typing import Any

from stub_job import command, environment, run_command, write_lines


def status(output: Path) -> dict[str, Any]:
    done = run_command("status", output, "--json")
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def test_status_through_a_jobs_life(tmp_path: Path) -> None:
    source = write_lines(
        tmp_path / "in.jsonl", *({"prompt": f"p{i}", "ignore_eos": True, "max_tokens": 400} for i in range(8)), b"x"
    )
    output = tmp_path / "out.jsonl"
    missing = run_command("status", output)
    assert missing.returncode == 2
    assert b"no job writes" in missing.stderr

    arguments = ["generate", "--input", source, "--output", output]
    with subprocess.Popen(
        command(*arguments, "--progress", "json"), env=environment({"step_seconds": 0.02}), stderr=subprocess.PIPE
    ) as running:
        assert running.stderr is not None
        running.stderr.readline()
        while (found := status(output))["live_tokens"] == 0 and found["state"] == "running":
            pass
        running.send_signal(signal.SIGINT)
        running.stderr.read()
    assert (found["state"], found["pid"], found["total"], found["done"], found["failed"]) == (
        "running",
        running.pid,
        9,
        1,
        1,
    )
    assert found["progress"]["total"] == 9

    found = status(output)
    assert (found["state"], found["pid"], found["total"], found["done"]) == ("interrupted", None, 9, 1)
    assert (found["live_rows"], found["live_tokens"] % 8) == (8, 0)
    assert b"interrupted; --resume goes on" in run_command("status", output).stdout

    assert run_command(*arguments, "--resume").returncode == 1
    found = status(output)
    assert (found["state"], found["done"], found["failed"], found["cut"]) == ("complete", 9, 1, 8)
