"""Packing that was interrupted: killed between any two steps it goes on, and ends with the same bytes."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
from tiny_models import tiny_checkpoint

from batchgen_lite.errors import StorageError, UsageError
from batchgen_lite.pack import packing
from batchgen_lite.pack.packing import PackOptions, pack_model, verify_packed
from batchgen_lite.pack.progress import Progress

Usage = namedtuple("Usage", "total used free")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("source") / "tiny"
    tiny_checkpoint("qwen3_moe", path, hidden_size=96, moe_intermediate_size=32, dtype="bfloat16")
    return path


@pytest.fixture(scope="module")
def expected(source: Path) -> dict[str, bytes]:
    """Names and bytes of an uninterrupted run."""
    pack_model(source, source.with_name("whole"), PackOptions(4))
    return contents(source.with_name("whole"))


def contents(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir()}


# Run in a process of its own: the NUMBERth rename kills it before it takes place.
KILLED = """
import os, signal, sys
from pathlib import Path
from batchgen_lite.pack.packing import PackOptions, pack_model
rename, left = os.replace, [int(sys.argv[3])]
def replace(*names):
    left[0] -= 1
    if left[0] == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    rename(*names)
os.replace = replace
pack_model(Path(sys.argv[1]), Path(sys.argv[2]), PackOptions(4))
"""


@pytest.mark.parametrize(("number", "finished"), [(3, 2), (5, 4)])
def test_killed_and_run_again(
    number: int, finished: int, source: Path, expected: dict[str, bytes], tmp_path: Path
) -> None:
    """There are four files, so the third rename is a layer's and the fifth the directory's."""
    output = tmp_path / "packed"
    command = [sys.executable, "-P", "-c", KILLED, str(source), str(output), str(number)]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    assert not output.exists()
    partial = tmp_path / "packed.partial"
    before = {path.name: path.stat().st_ino for path in partial.glob("*.bin")}
    assert len(before) == finished
    notes: list[str] = []
    report = pack_model(source, output, PackOptions(4), notes.append)
    assert report.resumed == finished
    assert notes[0] == f"going on: {finished} of 4 files are done"
    assert sum(note.startswith("packed ") for note in notes) == 4 - finished
    assert {name: (output / name).stat().st_ino for name in before} == before  # not written again
    assert not partial.exists()
    assert contents(output) == expected
    verify_packed(output)


def test_a_torn_line_and_a_short_file_do_not_count(source: Path, expected: dict[str, bytes], tmp_path: Path) -> None:
    output, partial = tmp_path / "packed", tmp_path / "packed.partial"
    stop_after(3, source, output)
    with open(partial / "layer-00001.bin", "r+b") as file:
        file.truncate(100)
    lines = (partial / "progress.jsonl").read_bytes()
    (partial / "progress.jsonl").write_bytes(lines[:-10])
    assert pack_model(source, output, PackOptions(4)).resumed == 1
    assert contents(output) == expected


class Stop(Exception):
    """Ends a run in the test's own process."""


def stop_after(files: int, source: Path, output: Path) -> None:
    written: list[Any] = []
    original = packing.write_file

    def write(*arguments: Any) -> Any:
        if len(written) == files:
            raise Stop
        written.append(original(*arguments))
        return written[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "write_file", write)
        with pytest.raises(Stop):
            pack_model(source, output, PackOptions(4))


def test_a_full_disk_keeps_finished_layers(source: Path, expected: dict[str, bytes], tmp_path: Path) -> None:
    output = tmp_path / "packed"
    calls: list[int] = []
    sync = os.fsync

    def full(descriptor: int) -> None:
        calls.append(descriptor)
        if "layer-00001" in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        sync(descriptor)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(StorageError, match=r"layer-00001\.bin\.partial: No space left on device; finished layers"):
            pack_model(source, output, PackOptions(4))
    assert pack_model(source, output, PackOptions(4)).resumed == 1
    assert contents(output) == expected


def test_too_little_disk_is_said_beforehand(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing.shutil, "disk_usage", lambda path: Usage(1 << 40, 0, 5 << 20))
    with pytest.raises(StorageError, match=r"needs 6\d\.\d MiB more on the disk of .*, 5\.00 MiB are free; make room"):
        pack_model(source, tmp_path / "packed", PackOptions(4))
    assert not list(tmp_path.rglob("*.bin"))


def test_other_settings_do_not_mix(source: Path, tmp_path: Path) -> None:
    output = tmp_path / "packed"
    stop_after(1, source, output)
    with pytest.raises(UsageError, match=r'unfinished packing .*"Q4_0".*; remove it, or pack with those settings'):
        pack_model(source, output, PackOptions(8))
    other = tmp_path / "other"
    shutil.copytree(source, other)
    os.utime(other / "model.safetensors", ns=(1, 1))
    with pytest.raises(UsageError, match="unfinished packing of another model"):
        pack_model(other, output, PackOptions(4))


def test_two_at_once_do_not_mix(source: Path, tmp_path: Path) -> None:
    output = tmp_path / "packed"
    with Progress(output, {"any": 1}), pytest.raises(UsageError, match="another process is packing into"):
        pack_model(source, output, PackOptions(4))


def test_the_list_is_what_it_seems(source: Path, tmp_path: Path) -> None:
    stop_after(2, source, tmp_path / "packed")
    lines = (tmp_path / "packed.partial" / "progress.jsonl").read_text().splitlines()
    assert json.loads(lines[0])["experts"] == "Q4_0"
    assert [json.loads(line)[0] for line in lines[1:]] == ["layer-00000.bin", "layer-00001.bin"]
