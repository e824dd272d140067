"""Help, flags, environment and what is shown."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest
from stub_job import command, environment, read_records, run_command, write_lines

from batchgen_lite.cli.display import PlainDisplay
from batchgen_lite.cli.generate import default_output, seconds_of
from batchgen_lite.cli.snapshot import Snapshot, duration, size
from batchgen_lite.errors import UsageError
from batchgen_lite.jobs.job import Counts
from batchgen_lite.runtime.interface import Progress


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_lines(tmp_path / "in.jsonl", *({"prompt": f"p{i}"} for i in range(5)), b"bad")


def test_help_needs_neither_torch_nor_a_tokenizer() -> None:
    look = (
        "import sys; from batchgen_lite.cli.app import run\n"
        "run(['--help']); run(['generate', '--help'])\n"
        "import batchgen_lite.jobs.job, batchgen_lite.llm\n"
        "heavy = {'torch', 'triton', 'transformers', 'tokenizers', 'numpy', 'gguf'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-P", "-c", look], capture_output=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    for words in (b"Examples:", b"Exit codes:", b"BATCHGEN_", b"--resume", b"143"):
        assert words in done.stdout
    assert b"--engine" not in done.stdout


def test_flags_have_mirrors_in_the_environment(source: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    done = run_command(
        "generate",
        BATCHGEN_INPUT=str(source),
        BATCHGEN_OUTPUT=str(output),
        BATCHGEN_MAX_TOKENS="2",
        BATCHGEN_IGNORE_EOS="1",
        BATCHGEN_PROGRESS="none",
    )
    assert done.returncode == 1
    assert done.stderr == b""
    assert {record["usage"]["completion_tokens"] for record in read_records(output)[:5]} == {2}
    manifest = json.loads((tmp_path / "out.jsonl.manifest.json").read_text())
    assert manifest["identity"]["sampling"] == {"ignore_eos": True, "max_tokens": 2}


def test_plain_output_says_before_and_after(source: Path, tmp_path: Path) -> None:
    error = run_command("generate", "--input", source, "--output", tmp_path / "out.jsonl").stderr.decode()
    assert re.search(r"rows +6, 1 settled without the model, 5 to answer", error)
    assert "in prompts, at most 2,560 to generate" in error
    assert "5 ok, 1 failed" in error
    assert re.search(r"decode\s+[\d,]+ tokens, [\d,.]+ tok/s", error)
    assert "\x1b" not in error


def test_verbose_says_what_decides_the_bytes(source: Path, tmp_path: Path) -> None:
    arguments = ["generate", "--input", source, "--output", tmp_path / "out.jsonl", "--seed", "41", "--top-k", "3"]
    error = run_command(*arguments, "-v").stderr.decode()
    assert re.search(r"seed +41\n", error)
    assert re.search(r"sampling +top_k 3\n", error)
    assert "out.jsonl.manifest.json" in error


def test_a_job_of_another_version_is_resumed_with_a_note(source: Path, tmp_path: Path) -> None:
    arguments = ["generate", "--input", source, "--output", tmp_path / "out.jsonl"]
    run_command(*arguments, "--limit", "2")
    manifest = tmp_path / "out.jsonl.manifest.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "tool_version": "0.0.1"}))
    done = run_command(*arguments, "--resume")
    assert b"begun by version 0.0.1" in done.stderr
    assert done.returncode == 1
    assert len(read_records(tmp_path / "out.jsonl")) == 6


def test_json_progress_is_one_object_a_line(source: Path, tmp_path: Path) -> None:
    done = run_command("generate", "--input", source, "--output", tmp_path / "out.jsonl", "--progress", "json")
    events = [json.loads(line) for line in done.stderr.splitlines()]
    assert [event["event"] for event in events] == ["plan", "progress", "summary"]
    assert (events[-1]["ok"], events[-1]["failed"], events[-1]["left"]) == (5, 1, 0)


@pytest.mark.parametrize(("no_color", "coloured"), [("", True), ("1", False)])
def test_a_terminal_gets_a_bar(source: Path, tmp_path: Path, no_color: str, coloured: bool) -> None:
    master, slave = pty.openpty()
    more = {"NO_COLOR": no_color} if no_color else {}
    env = environment({"step_seconds": 0.01, "batch": 1}, TERM="xterm-256color", COLUMNS="100", **more)
    if not no_color:
        env.pop("NO_COLOR", None)
    arguments = command("generate", "--input", source, "--output", tmp_path / "out.jsonl")
    with subprocess.Popen(arguments, env=env, stderr=slave, stdout=subprocess.PIPE) as running:
        os.close(slave)
        shown = b""
        while piece := _read(master):
            shown += piece
        assert running.stdout is not None
        assert running.stdout.read() == b""
    os.close(master)
    text = shown.decode()
    assert running.returncode == 1
    for words in ("5 to answer", "1/6", "tok/s", "disk-bound", "5 ok, 1 failed"):
        assert words in text
    assert ("\x1b[36m" in text) is coloured
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h")  # the cursor is shown again


def _read(master: int) -> bytes:
    try:
        return os.read(master, 65536)
    except OSError:  # Linux says EIO when the other side has closed
        return b""


def test_completion_scripts_are_clicks_own() -> None:
    done = run_command(_BATCHGEN_LITE_COMPLETE="bash_source")
    assert done.returncode == 0
    assert b"_batchgen_lite_completion" in done.stdout


@pytest.mark.parametrize(
    ("text", "seconds"), [("7h", 25200), ("1h30m", 5400), ("90m", 5400), ("30s", 30), ("30", 30), ("0.5H", 1800)]
)
def test_times(text: str, seconds: float) -> None:
    assert seconds_of(text) == seconds


@pytest.mark.parametrize("text", ["", "h", "0", "-3", "5d", "1h 30m x"])
def test_times_that_are_none(text: str) -> None:
    with pytest.raises(UsageError):
        seconds_of(text)


def test_where_answers_go_by_default() -> None:
    assert default_output("a/prompts.jsonl") == "a/prompts.out.jsonl"
    assert default_output("prompts.jsonl.gz") == "prompts.out.jsonl"
    assert default_output("prompts") == "prompts.out.jsonl"
    assert default_output("-") == "-"


def test_figures_for_people() -> None:
    assert [duration(s) for s in (0.04, 59.94, 60, 3599.6, 86400 * 3)] == [
        "0.0 s",
        "59.9 s",
        "1:00",
        "1:00:00",
        "72:00:00",
    ]
    assert [size(b) for b in (5, 1500, 2.5e6, 3.25e9, 12.5e12)] == [
        "5 B",
        "1.46 KiB",
        "2.38 MiB",
        "3.03 GiB",
        "11.4 TiB",
    ]


def test_plain_lines_come_now_and_then(capsys: pytest.CaptureFixture[str]) -> None:
    snapshot = Snapshot(
        Counts(100, 40, 2, 1), Progress(decode_rate=1234.5, read_rate=2.5e9, bound_by="disk", eta_seconds=75)
    )
    seldom, often = PlainDisplay(sys.stdout, seconds=1e9), PlainDisplay(sys.stdout, seconds=0)
    seldom.update(snapshot)
    assert capsys.readouterr().out == ""
    often.update(snapshot)
    assert capsys.readouterr().out == "40/100 rows, 2 failed, 1,234 tok/s, 2.33 GiB/s, disk-bound, ETA 1:15\n"
