"""``--spill-dir`` through the command: what a killed run leaves there, and who tidies it up."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
from pathlib import Path

from stub_job import command, read_records, write_lines
from tiny_models import tiny_checkpoint
from tiny_tokenizers import train_byte_level, write_directory


def test_a_killed_run_leaves_its_file_and_the_next_one_removes_it(tmp_path: Path) -> None:
    model, folder, output = tmp_path / "model", tmp_path / "spill", tmp_path / "out.jsonl"
    tiny_checkpoint("llama", model, vocab_size=431)
    write_directory(model, train_byte_level())
    lines = [{"prompt": f"row {i}", "max_tokens": 40 if i % 4 else 400, "ignore_eos": True} for i in range(24)]
    prompts = write_lines(tmp_path / "prompts.jsonl", *lines)
    arguments = ["generate", "--model", model, "--input", prompts, "--output", output, "--temperature", "0"]
    arguments += ["--progress", "plain", "--spill-dir", folder, "--disk", "64MiB", "--spill-write-limit", "1GiB"]
    partial = output.with_name("out.jsonl.partial")
    with subprocess.Popen(command(*arguments), stderr=subprocess.PIPE, text=True) as running:
        while running.poll() is None and not (partial.exists() and partial.stat().st_size):
            os.sched_yield()
        running.send_signal(signal.SIGKILL)
        running.communicate()
    assert running.returncode == -signal.SIGKILL
    [left] = folder.iterdir()
    assert stat.S_IMODE(left.stat().st_mode) == 0o600
    resumed = subprocess.run(command(*arguments, "--resume"), capture_output=True, text=True, timeout=120, check=False)
    assert resumed.returncode == 0, resumed.stderr
    assert "KV spill" in resumed.stderr
    assert list(folder.iterdir()) == []
    assert len(read_records(output)) == 24
