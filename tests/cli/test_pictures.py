"""--trace and --report through the real command, with the stub engine."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from stub_job import command, environment, read_records, run_command, write_lines

from batchgen_lite.errors import UsageError
from batchgen_lite.pictures import Pictures


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_lines(tmp_path / "in.jsonl", *({"custom_id": f"r{i}", "prompt": f"p{i}"} for i in range(12)))


def generate(source: Path, *more: str | Path, stub: dict[str, Any] | None = None) -> tuple[int, str]:
    done = run_command(
        "generate", "--input", source, "--output", source.with_name("out.jsonl"), "--seed", "7", *more, stub=stub
    )
    error = done.stderr.decode()
    assert "Traceback" not in error
    return done.returncode, error


def sweeps_in(trace: Path) -> int:
    events = json.loads(trace.read_text())["traceEvents"]
    return sum(event.get("cat") == "sweep" for event in events)


def test_a_trace_is_written_beside_the_answers(source: Path) -> None:
    trace = source.with_name("trace.json")
    assert generate(source, "--trace", trace)[0] == 0
    assert len(read_records(source.with_name("out.jsonl"))) == 12
    assert sweeps_in(trace) > 1
    assert not [path for path in trace.parent.iterdir() if path.name.startswith(".")]


def test_a_report_is_written_too(source: Path) -> None:
    report = source.with_name("report.html")
    assert generate(source, "--report", report)[0] == 0
    page = report.read_text()
    assert "12 ok, 0 failed" in page
    assert 'id="plot-batch"' in page


def test_a_report_without_its_library_names_the_extra(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UsageError, match=re.escape("pip install 'batchgen-lite[report]'")):
        Pictures(None, str(source.with_name("report.html")), ())
    assert Pictures(str(source.with_name("trace.json")), None, ()).recorder.active


def test_an_interrupted_run_leaves_its_trace(source: Path) -> None:
    trace, output = source.with_name("trace.json"), source.with_name("out.jsonl")
    arguments = command("generate", "--input", source, "--output", output, "--trace", trace, "--progress", "json")
    slow = environment({"step_seconds": 0.01, "mean_tokens": 100000, "batch": 2})
    with subprocess.Popen(arguments, env=slow, stderr=subprocess.PIPE, text=True) as running:
        assert running.stderr is not None
        for line in running.stderr:
            if json.loads(line).get("sweeps"):  # some sweeps are done: now
                running.send_signal(signal.SIGINT)
                break
        running.stderr.read()
    assert running.returncode == 130
    assert sweeps_in(trace) >= 1


def test_a_run_that_the_disk_ends_leaves_its_trace(source: Path) -> None:
    trace = source.with_name("trace.json")
    code, _ = generate(source, "--trace", trace, stub={"fail_sweep": 3})
    assert code == 5
    assert sweeps_in(trace) == 2


def test_a_trace_that_cannot_be_written_costs_no_answer(source: Path) -> None:
    """The folder goes away while the run is on its way."""
    folder = source.with_name("gone")
    folder.mkdir()
    trace = folder / "trace.json"
    arguments = command("generate", "--input", source, "--trace", trace, "--progress", "json")
    slow = environment({"step_seconds": 0.01})
    with subprocess.Popen(arguments, env=slow, stderr=subprocess.PIPE, text=True) as running:
        assert running.stderr is not None
        for line in running.stderr:
            if json.loads(line)["event"] == "plan":
                os.rmdir(folder)
                break
        said = running.stderr.read()
    assert running.returncode == 0
    assert f"{trace} could not be written: No such file or directory" in said
    assert len(read_records(source.with_name("in.out.jsonl"))) == 12


def test_nothing_to_answer_draws_nothing(source: Path) -> None:
    trace = source.with_name("trace.json")
    assert generate(source)[0] == 0
    assert generate(source, "--resume", "--trace", trace)[0] == 0
    assert not trace.exists()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--trace", "trace.txt"], "--trace is 'trace.txt': its name must end in .json or .json.gz"),
        (["--trace", ".json"], "must end in"),
        (["--report", "report.pdf"], "--report is 'report.pdf': its name must end in .html"),
        (["--trace", "none/trace.json"], "there is no folder none; make it first"),
        (["--trace", "folder.json"], "which is a folder"),
        (["--trace", "prompts.json", "--input", "prompts.json"], "which is a file of the run itself"),
        (["--trace", "hard-link.json", "--input", "prompts.json"], "which is a file of the run itself"),
    ],
)
def test_names_that_cannot_be_right_are_refused_at_once(source: Path, flags: list[str], words: str) -> None:
    folder = source.parent
    (folder / "folder.json").mkdir()
    (folder / "prompts.json").write_bytes(source.read_bytes())
    os.link(folder / "prompts.json", folder / "hard-link.json")
    done = subprocess.run(
        command("generate", "--input", source, "--output", "out.jsonl", *flags),
        env=environment(),
        capture_output=True,
        text=True,
        cwd=folder,
        check=False,
    )
    assert done.returncode == 2
    assert words in done.stderr
    assert not (folder / "out.jsonl").exists()
    assert (folder / "prompts.json").read_bytes() == source.read_bytes()
