"""What may become an output, and what an existing one means."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from stub_job import run_job, write_lines

from batchgen_lite.errors import OutputExistsError, UsageError
from batchgen_lite.jobs.claim import Start, claim_output


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_lines(tmp_path / "in.jsonl", {"prompt": "a"}, {"prompt": "b"})


def claim(output: Path | str, source: Path, **options: bool) -> Start:
    held = claim_output(str(output), str(source), **options)
    held.release()
    return held.start


def test_output_must_not_be_the_input(tmp_path: Path, source: Path) -> None:
    (tmp_path / "link").symlink_to(source)
    os.link(source, tmp_path / "hard")
    (tmp_path / "folder").symlink_to(tmp_path)
    (tmp_path / "below").mkdir()
    for same in ("in.jsonl", "link", "hard", "folder/in.jsonl", "below/../in.jsonl"):
        with pytest.raises(UsageError, match="are the same file"):
            claim(tmp_path / same, source, overwrite=True)
    assert source.read_bytes().count(b"\n") == 2


def test_the_jobs_own_files_must_not_be_the_input_either(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "out.jsonl.partial", {"prompt": "a"})
    with pytest.raises(UsageError, match=r"out\.jsonl\.partial are the same file"):
        claim(tmp_path / "out.jsonl", source)


def test_outputs_that_cannot_be(tmp_path: Path, source: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for output, words in [
        (tmp_path, "is a directory"),
        (tmp_path / "none" / "out.jsonl", "does not exist; create it"),
        (tmp_path / "fifo", "not a regular file"),
        (Path("/dev/null"), "not a regular file"),
    ]:
        with pytest.raises(UsageError, match=words):
            claim(output, source)
    with pytest.raises(UsageError, match="contradict"):
        claim(tmp_path / "out", source, resume=True, overwrite=True)
    with pytest.raises(UsageError, match="--resume needs"):
        claim("-", source, resume=True)


def test_a_link_as_output_means_its_target(tmp_path: Path, source: Path) -> None:
    target = tmp_path / "elsewhere" / "real.jsonl"
    target.parent.mkdir()
    (tmp_path / "out.jsonl").symlink_to(target)
    run_job(source, tmp_path / "out.jsonl")
    assert target.read_bytes().count(b"\n") == 2
    assert (tmp_path / "out.jsonl").is_symlink()


def test_what_exists_decides_how_a_run_starts(tmp_path: Path, source: Path) -> None:
    output = tmp_path / "out.jsonl"
    assert claim(output, source) is Start.FRESH
    assert claim(output, source, resume=True) is Start.FRESH
    run_job(source, output)
    with pytest.raises(OutputExistsError, match="--resume goes on"):
        claim(output, source)
    assert claim(output, source, resume=True) is Start.REOPEN
    assert claim(output, source, overwrite=True) is Start.FRESH
    (tmp_path / "out.jsonl.manifest.json").unlink()
    with pytest.raises(UsageError, match="is missing"):
        claim(output, source, resume=True)
    output.unlink()
    assert claim(output, source) is Start.FRESH


def test_an_output_of_another_tool_is_not_touched(tmp_path: Path, source: Path) -> None:
    output = tmp_path / "out.jsonl"
    output.write_text("mine\n")
    with pytest.raises(OutputExistsError):
        run_job(source, output)
    with pytest.raises(UsageError, match="is missing"):
        run_job(source, output, resume=True)
    assert output.read_text() == "mine\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl"]
