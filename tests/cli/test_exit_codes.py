"""Every documented exit code, reached through the real command; no traceback on the way."""

from __future__ import annotations

import gzip
import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from stub_job import command, environment, read_records, run_command, write_lines


def generate(source: Path, *more: str | Path, stub: dict[str, Any] | None = None, **env: str) -> tuple[int, str]:
    """Exit code and standard error."""
    arguments = ["generate", "--input", source, "--output", source.with_name("out.jsonl"), "--seed", "7", *more]
    done = run_command(*arguments, stub=stub, **env)
    error = done.stderr.decode()
    assert done.stdout == b""
    assert "Traceback" not in error
    return done.returncode, error


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_lines(tmp_path / "in.jsonl", *({"custom_id": f"r{i}", "prompt": f"p{i}"} for i in range(12)))


def test_0_all_rows_answered_and_2_the_output_exists(source: Path) -> None:
    assert generate(source)[0] == 0
    code, error = generate(source)
    assert code == 2
    assert "--resume goes on with it, --overwrite starts again" in error
    assert generate(source, "--resume")[0] == 0
    assert generate(source, "--overwrite")[0] == 0


def test_2_a_job_goes_on_with_the_kv_dtype_that_it_began_with(source: Path) -> None:
    assert generate(source, "--kv-dtype", "int8", "--limit", "4")[0] == 0
    code, error = generate(source, "--resume")
    assert code == 2
    assert 'engine.kv_dtype: was "int8", is "auto"' in error
    assert generate(source, "--resume", "--kv-dtype", "int8")[0] == 0


def test_1_some_rows_failed(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", {"prompt": "a"}, b"nope")
    code, error = generate(source)
    assert code == 1
    assert "1 ok, 1 failed" in error
    assert read_records(tmp_path / "out.jsonl")[1]["error"]["line"] == 2


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--frobnicate"], "No such option"),
        (["--limit", "0"], "--limit"),
        (["--temperature", "-3"], "temperature is -3"),
        (["--kv-dtype", "int4"], "--kv-dtype"),
        (["--disk", "4GiB"], "--disk limits the spill file, but there is none; give --spill-dir"),
        (["--spill-write-limit", "4GiB"], "--spill-write-limit limits the spill file, but there is none"),
        (["--spill-dir", ".", "--disk", "much"], "--disk: 'much' is not a size"),
        (["--ram", "lots"], "--ram: 'lots' is not a size"),
        (["--device", "tpu"], "--device is 'tpu': it must be auto, cpu, cuda, or cuda:N"),
        (["--device", "sim", "--vram", "0"], "--vram: '0' is no memory at all"),
        (["--device", "cpu", "--vram", "1GiB"], "is for a device with memory of its own"),
        (["--max-time", "never"], "--max-time is 'never'"),
        (["--date", "tomorrow"], "--date is 'tomorrow'"),
        (["--chat-template-kwargs", "[1]"], "must be a JSON object"),
        (["--resume", "--overwrite"], "contradict"),
        (["--input", "none.jsonl"], "cannot read the input none.jsonl: No such file"),
        (["--input", "."], "is a directory"),
        (["--output", "none/out.jsonl"], "does not exist; create it"),
        (["--engine", "warp"], "--engine is 'warp'"),
    ],
)
def test_2_wrong_use(source: Path, flags: list[str], words: str) -> None:
    code, error = generate(source, *flags)
    assert code == 2
    assert words in error
    assert [path.name for path in source.parent.iterdir()] == ["in.jsonl"]


def test_2_output_is_input_through_a_link(source: Path) -> None:
    source.with_name("out.jsonl").symlink_to(source)
    before = source.read_bytes()
    code, error = generate(source, "--overwrite")
    assert code == 2
    assert "are the same file" in error
    assert source.read_bytes() == before


def said(running: subprocess.Popen[bytes], words: bytes) -> bool:
    """Wait for a line with these words. Others may come before: a busy machine says that it is still scanning."""
    assert running.stderr is not None
    return any(words in line for line in running.stderr)


def test_2_another_run_writes_the_output(source: Path) -> None:
    arguments = command("generate", "--input", source, "--output", source.with_name("out.jsonl"), "--progress", "json")
    with subprocess.Popen(arguments, env=environment({"step_seconds": 30}), stderr=subprocess.PIPE) as running:
        try:
            assert said(running, b'"event": "plan"')
            code, error = generate(source, "--resume")
            running.send_signal(signal.SIGINT)
            running.stderr.read()
        except BaseException:
            running.kill()  # else leaving the block would wait for it
            raise
    assert code == 2
    assert f"process {running.pid} on" in error
    assert running.returncode == 130


def test_3_the_model_cannot_be_loaded(source: Path) -> None:
    code, error = generate(source, "--model", "./no-such-model", BATCHGEN_ENGINE="auto")
    assert code == 3
    assert "no such model: ./no-such-model" in error
    code, error = generate(source, "--model", "nobody/nothing", BATCHGEN_ENGINE="auto")
    assert code == 3
    assert "nobody/nothing is not complete in the hub's cache" in error
    assert [path.name for path in source.parent.iterdir()] == ["in.jsonl"]


@pytest.mark.parametrize(
    ("raised", "code"), [("ModelError", 3), ("BudgetError", 4), ("StorageError", 5), ("AnOversight", 70)]
)
def test_3_4_5_70_what_an_engine_raises(source: Path, raised: str, code: int) -> None:
    found, error = generate(source, stub={"fail_sweep": 9, "fail_with": raised})
    assert found == code
    assert raised in error
    assert generate(source, "--resume")[0] == 0
    resumed = source.with_name("out.jsonl").read_bytes()
    assert generate(source, "--overwrite")[0] == 0
    assert source.with_name("out.jsonl").read_bytes() == resumed


def test_4_nothing_was_done_so_the_same_command_may_be_given_again(source: Path) -> None:
    assert generate(source, stub={"fail_sweep": 1, "fail_with": "BudgetError"})[0] == 4
    assert [path.name for path in source.parent.iterdir()] == ["in.jsonl"]
    assert generate(source)[0] == 0


def test_5_no_space_left(source: Path) -> None:
    """A limit on file sizes stands for the full disk: the kernel refuses the write half done, as there."""
    limit = 2000

    def limited() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    arguments = command("generate", "--input", source, "--output", source.with_name("out.jsonl"), "--seed", "7")
    full = subprocess.run(
        arguments, env=environment(), capture_output=True, preexec_fn=limited, timeout=300, check=False
    )
    assert full.returncode == 5
    assert b"finished work is saved" in full.stderr
    assert b"Traceback" not in full.stderr
    assert generate(source, "--resume")[0] == 0
    resumed = source.with_name("out.jsonl").read_bytes()
    assert len(resumed) > limit
    assert generate(source, "--overwrite")[0] == 0
    assert source.with_name("out.jsonl").read_bytes() == resumed


def test_5_standard_output_is_full_or_gone(source: Path) -> None:
    arguments = command("generate", "--input", source, "--output", "-")
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            arguments, env=environment(), stdout=full, stderr=subprocess.PIPE, timeout=300, check=False
        )
    assert done.returncode == 5
    assert b"cannot write to standard output: No space left" in done.stderr
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(arguments, env=environment(), stdout=writer, stderr=subprocess.PIPE, timeout=300, check=False)
    os.close(writer)
    assert done.returncode == 5
    assert done.stderr.count(b"Error") == 1
    assert b"Exception ignored" not in done.stderr


@pytest.mark.parametrize("progress", ["plain", "json", "bar"])
def test_nobody_reading_the_progress_does_not_end_the_run(source: Path, progress: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    output = source.with_name("out.jsonl")
    arguments = command("generate", "--input", source, "--output", output, "--progress", progress)
    done = subprocess.run(arguments, env=environment({"step_seconds": 0.01}), stderr=writer, timeout=300, check=False)
    os.close(writer)
    assert done.returncode == 0
    assert len(read_records(output)) == 12


def test_70_shows_where_only_when_asked(source: Path) -> None:
    arguments = ["generate", "--input", source, "--output", source.with_name("out.jsonl"), "--overwrite"]
    stub = {"fail_sweep": 1, "fail_with": "AnOversight"}
    assert b"Traceback" not in run_command(*arguments, "-v", stub=stub).stderr
    assert b"Traceback" in run_command(*arguments, "-vv", stub=stub).stderr
    assert b"Traceback" in run_command(*arguments, stub=stub, BATCHGEN_VERBOSE="2").stderr


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 143)])
def test_130_143_signals_stop_cleanly(source: Path, number: signal.Signals, code: int) -> None:
    """The first signal, in the middle of a sweep that would take a minute: flushed and ended at once."""
    output = source.with_name("out.jsonl")
    arguments = command("generate", "--input", source, "--output", output, "--seed", "7", "--progress", "json")
    with subprocess.Popen(arguments, env=environment({"step_seconds": 60}), stderr=subprocess.PIPE) as running:
        assert running.stderr is not None
        assert said(running, b'"event": "plan"')
        assert said(running, b'"event": "progress"')
        running.send_signal(number)
        rest = running.stderr.read().decode()
    assert running.returncode == code
    assert "Traceback" not in rest
    assert json.loads(rest.splitlines()[-1])["left"] == 12
    assert not output.exists()


def test_130_in_the_first_pass(source: Path) -> None:
    """Reading a pipe that nobody fills, for instance."""
    arguments = command("generate", "--input", "-", "--output", source.with_name("out.jsonl"))
    with subprocess.Popen(arguments, env=environment(), stdin=subprocess.PIPE, stderr=subprocess.PIPE) as running:
        lock = source.with_name("out.jsonl.lock")
        while not lock.exists() and running.poll() is None:
            pass
        running.send_signal(signal.SIGINT)
        assert running.wait(300) == 130
    assert [path.name for path in source.parent.iterdir()] == ["in.jsonl"]


def test_the_second_signal_ends_at_once(source: Path) -> None:
    """An engine that does not listen must not keep the user waiting."""
    deaf = (
        "import asyncio, sys\n"
        "from batchgen_lite.runtime.stub import StubEngine\n"
        "StubEngine.request_stop = lambda self: print('asked', file=sys.stderr, flush=True)\n"
        "from batchgen_lite.cli import main\n"
        "main(sys.argv[1:])\n"
    )
    arguments = ["generate", "--input", source, "--output", source.with_name("out.jsonl"), "--progress", "json"]
    process = [sys.executable, "-P", "-c", deaf, *map(str, arguments)]
    with subprocess.Popen(process, env=environment({"step_seconds": 60}), stderr=subprocess.PIPE) as running:
        assert running.stderr is not None
        assert said(running, b'"event": "plan"')
        assert said(running, b'"event": "progress"')
        running.send_signal(signal.SIGTERM)
        while running.stderr.readline() != b"asked\n":
            pass
        assert running.poll() is None
        running.send_signal(signal.SIGTERM)
        assert running.wait(300) == 143


def test_max_time_stops_cleanly(source: Path) -> None:
    code, error = generate(source, "--max-time", "0.05s", stub={"step_seconds": 60})
    assert code == 130
    assert "stopped; finished work is saved, --resume goes on" in error


def test_gz_and_pipes_give_the_same_bytes_as_the_file(source: Path, tmp_path: Path) -> None:
    assert generate(source)[0] == 0
    expected = (tmp_path / "out.jsonl").read_bytes()
    halves = source.read_bytes().splitlines(keepends=True)
    packed = gzip.compress(b"".join(halves[:5])) + gzip.compress(b"".join(halves[5:]))  # two members
    (tmp_path / "in.gz").write_bytes(packed)
    for name, given, stdin in [
        ("gz", tmp_path / "in.gz", b""),
        ("pipe", "-", source.read_bytes()),
        ("both", "-", packed),
    ]:
        output = tmp_path / f"{name}.jsonl"
        done = run_command("generate", "--input", given, "--output", output, "--seed", "7", stdin=stdin)
        assert done.returncode == 0, done.stderr
        assert output.read_bytes() == expected
        assert not output.with_name(output.name + ".input").exists()
    to_stdout = run_command("generate", "--input", "-", "--seed", "7", stdin=source.read_bytes())
    assert to_stdout.stdout == expected


def test_a_damaged_gz_is_refused(tmp_path: Path) -> None:
    (tmp_path / "in.gz").write_bytes(gzip.compress(b'{"prompt": "a"}\n' * 5000)[:-20])
    code, error = generate(tmp_path / "in.gz")
    assert code == 2
    assert "gz data is damaged" in error
    assert [path.name for path in tmp_path.iterdir()] == ["in.gz"]


def test_a_piped_job_is_resumed_without_the_pipe(source: Path, tmp_path: Path) -> None:
    assert generate(source)[0] == 0
    output = tmp_path / "piped.jsonl"
    arguments = ["generate", "--input", "-", "--output", output, "--seed", "7"]
    stopped = run_command(*arguments, stub={"fail_sweep": 9}, stdin=source.read_bytes())
    assert stopped.returncode == 5
    assert run_command(*arguments, "--resume").returncode == 0
    assert output.read_bytes() == (tmp_path / "out.jsonl").read_bytes()
