"""Limits by control groups: found in both versions, entered before the command starts, removed with what is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from limits import (
    Controller,
    LimitedGroup,
    LimitsUnavailable,
    find_controller,
    group_of,
    limited,
    whole_disk,
    why_unavailable,
    write_setting,
)

V1 = "32 31 0:29 / {root}/cpu rw - cgroup cgroup rw,cpu\n35 31 0:32 / {root}/memory rw - cgroup cgroup rw,memory\n"
V2 = "41 31 0:38 / {root}/unified rw - cgroup2 cgroup2 rw\n"


def mounts(tmp_path: Path, text: str, controllers: str = "") -> Path:
    (tmp_path / "unified").mkdir()
    (tmp_path / "unified" / "cgroup.controllers").write_text(controllers)
    path = tmp_path / "mountinfo"
    path.write_text(text.format(root=tmp_path))
    return path


def test_version_one_is_found_beside_an_empty_version_two(tmp_path: Path) -> None:
    found = find_controller("memory", "memory", mounts(tmp_path, V1 + V2))
    assert found == Controller(1, tmp_path / "memory")


def test_version_two_is_found_by_its_own_name(tmp_path: Path) -> None:
    found = find_controller("blkio", "io", mounts(tmp_path, V1 + V2, "cpuset io memory\n"))
    assert found == Controller(2, tmp_path / "unified")


def test_a_missing_controller_is_named(tmp_path: Path) -> None:
    with pytest.raises(LimitsUnavailable, match=r'"blkio".*"io"'):
        find_controller("blkio", "io", mounts(tmp_path, V1 + V2))


@pytest.mark.parametrize("partition", [False, True])
def test_a_partition_stands_for_its_disk(partition: bool, tmp_path: Path) -> None:
    number = tmp_path.stat().st_dev
    disk = tmp_path / "block" / "vda"
    here = disk / "vda1" if partition else disk
    here.mkdir(parents=True)
    (disk / "dev").write_text("254:0\n")
    if partition:
        (here / "dev").write_text("254:1\n")
        (here / "partition").write_text("1\n")
    devices = tmp_path / "devices"
    devices.mkdir()
    (devices / f"{os.major(number)}:{os.minor(number)}").symlink_to(here)
    assert whole_disk(tmp_path, devices) == "254:0"


def test_a_file_system_without_a_disk_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LimitsUnavailable, match="no block device"):
        whole_disk(tmp_path, tmp_path / "none")


def test_a_setting_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(LimitsUnavailable, match=r'"7".*memory\.max'):
        write_setting(tmp_path / "missing" / "memory.max", "7")


def test_the_command_enters_every_group_before_it_runs(tmp_path: Path) -> None:
    folders = [tmp_path / "one", tmp_path / "two words"]
    for folder in folders:
        folder.mkdir()
    command = LimitedGroup(folders).command([sys.executable, "-c", "import os; print(os.getpid(), '$0 *')"])
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split(maxsplit=1)
    assert shown[1] == "$0 *\n"
    assert [(folder / "cgroup.procs").read_text().strip() for folder in folders] == [shown[0]] * 2


def test_a_group_that_cannot_be_entered_stops_the_command(tmp_path: Path) -> None:
    command = LimitedGroup([tmp_path / "gone"]).command(["echo", "ran"])
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (125, "")


def test_without_limits_the_command_is_unchanged() -> None:
    with limited() as group:
        assert group.command(["a", "b"]) == ["a", "b"]
        assert group.peak_bytes() is None


def test_a_rate_needs_a_disk() -> None:
    with pytest.raises(ValueError, match="path"), limited(read_rate=10**6):
        pass


def test_a_group_is_removed_with_what_is_left_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On plain folders: the list of processes is a file, which this test takes away when they are killed."""
    killed: list[tuple[int, int]] = []

    def kill(pid: int, number: int) -> None:
        killed.append((pid, number))
        (tmp_path / "group" / "cgroup.procs").unlink()

    monkeypatch.setattr("limits.os.kill", kill)
    monkeypatch.setattr("limits.read_processes", lambda folder: [] if killed else [4_000_001])
    with group_of(Controller(1, tmp_path), "group", "memory") as folder:
        (folder / "cgroup.procs").write_text("")
    assert killed == [(4_000_001, signal.SIGKILL)]
    assert not folder.exists()


def test_real_limits_hold_here_or_say_why_not(tmp_path: Path) -> None:
    """Where groups can be made (root on most machines), a process over the ceiling is killed; elsewhere the reason
    is one line of text."""
    reason = why_unavailable(memory=True)
    if reason is not None:
        assert "cgroup" in reason or "control group" in reason or "cannot write" in reason
        return
    with limited(memory=64 << 20) as group:
        held = subprocess.run(group.command([sys.executable, "-c", "x = bytearray(200 << 20)"]), check=False)
        assert held.returncode == -9
        assert group.killed_for_memory() == 1
        assert (group.peak_bytes() or 0) <= 64 << 20
        folders = list(group.folders)
    assert folders
    assert not any(folder.exists() for folder in folders)
