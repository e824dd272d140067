"""The spill file: slots, limits, faults of the disk, and what other runs and killed ones leave in its directory."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from batchgen_lite.errors import StorageError
from batchgen_lite.offload.arena import Arena
from batchgen_lite.offload.spill_file import SpillCalls, SpillFile, remove_abandoned

RECORD = 5000  # two blocks of 4096


@pytest.fixture
def record() -> Iterator[memoryview]:
    with Arena(8192) as arena:
        yield arena.view


def filled(record: memoryview, value: int) -> memoryview:
    record[:] = bytes([value]) * len(record)
    return record


def test_records_come_back_and_slots_are_used_again(tmp_path: Path, record: memoryview) -> None:
    file = SpillFile(tmp_path, RECORD, limit=3 * 8192)
    assert file.slot_bytes == 8192
    slots = [file.write(filled(record, value)) for value in (1, 2, 3)]
    assert slots == [0, 1, 2]
    assert file.free == 0
    assert file.write(record) is None
    assert file.statistics.problems == {"the limits of the spill file were reached": 1}
    file.release(1)
    assert file.write(filled(record, 4)) == 1
    for slot, value in ((0, 1), (1, 4), (2, 3)):
        assert file.read(slot, record)
        assert bytes(record) == bytes([value]) * 8192
    assert file.path.stat().st_size == file.statistics.largest_bytes == 3 * 8192
    assert file.statistics.bytes_written == 4 * 8192
    file.close()
    file.close()


def test_nobody_else_may_read_it_and_nothing_is_left(tmp_path: Path, record: memoryview) -> None:
    before = os.umask(0)
    try:
        file = SpillFile(tmp_path / "new" / "place", RECORD)
    finally:
        os.umask(before)
    file.write(record)
    assert stat.S_IMODE(file.path.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.path.parent.stat().st_mode) == 0o700
    file.close()
    assert list(file.path.parent.iterdir()) == []


def test_the_write_limit_counts_everything_ever_written(tmp_path: Path, record: memoryview) -> None:
    file = SpillFile(tmp_path, RECORD, limit=10 * 8192, write_limit=3 * 8192 + 100)
    for _ in range(3):
        slot = file.write(record)
        assert slot == 0
        file.release(slot)
    assert file.free == 0
    assert file.write(record) is None
    file.close()


@pytest.mark.parametrize("limit", [0, 1, 8191])
def test_a_limit_below_one_record_stores_nothing(limit: int, tmp_path: Path, record: memoryview) -> None:
    file = SpillFile(tmp_path, RECORD, limit=limit)
    assert file.free == 0
    assert file.write(record) is None
    assert file.path.stat().st_size == 0
    file.close()


class Disk:
    """Real calls, of which some fail or fall short."""

    def __init__(self) -> None:
        self.writes: list[int | OSError] = []  # what the next writes do: at most so many bytes, or an error
        self.reads: list[int | OSError] = []
        self.opens: list[OSError] = []

    def open(self, path: Path, flags: int, mode: int) -> int:
        if self.opens and flags & os.O_DIRECT:
            raise self.opens.pop()
        return os.open(path, flags, mode)

    def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
        return os.pwrite(fd, data[: _next(self.writes, len(data))], offset)

    def pread(self, fd: int, target: memoryview, offset: int) -> int:
        return os.preadv(fd, [target[: _next(self.reads, len(target))]], offset)

    @property
    def calls(self) -> SpillCalls:
        return SpillCalls(self.open, self.pwrite, self.pread)


def _next(planned: list[int | OSError], usual: int) -> int:
    step = planned.pop(0) if planned else usual
    if isinstance(step, OSError):
        raise step
    return step


def fault(number: int) -> OSError:
    return OSError(number, os.strerror(number))


def test_a_full_disk_keeps_what_it_has_and_takes_no_more(tmp_path: Path, record: memoryview) -> None:
    disk = Disk()
    file = SpillFile(tmp_path, RECORD, calls=disk.calls)
    file.write(filled(record, 1))
    disk.writes = [4096, fault(errno.ENOSPC)]
    assert file.write(filled(record, 2)) is None
    assert file.statistics.problems == {"No space left on device": 1}
    assert file.path.stat().st_size == 8192  # the half record is given back
    assert file.free == 0
    file.release(0)
    assert file.free == 1  # its own room serves again
    assert file.write(filled(record, 3)) == 0
    assert file.read(0, record)
    assert set(bytes(record)) == {3}
    file.close()


def test_a_broken_disk_is_left_alone(tmp_path: Path, record: memoryview) -> None:
    disk = Disk()
    file = SpillFile(tmp_path, RECORD, calls=disk.calls)
    file.write(filled(record, 1))
    disk.writes = [fault(errno.EIO)]
    assert file.write(record) is None
    assert file.free == 0
    assert file.read(0, record)
    disk.reads = [fault(errno.EIO)]
    assert not file.read(0, record)
    assert file.statistics.problems == {"Input/output error": 2}
    file.release(0)
    assert file.free == 0
    file.close()


@pytest.mark.parametrize("step", [1, 512, 4096, 5000])
def test_short_writes_and_reads_go_on(step: int, tmp_path: Path, record: memoryview) -> None:
    disk = Disk()
    file = SpillFile(tmp_path, RECORD, calls=disk.calls)
    pattern = os.urandom(8192)
    record[:] = pattern
    disk.writes = [step, 512]
    slot = file.write(record)
    assert slot == 0
    filled(record, 0)
    disk.reads = [step, 512]
    assert file.read(slot, record)
    assert bytes(record) == pattern
    file.close()


@pytest.mark.parametrize("where", ["open", "write", "read"])
def test_file_systems_without_direct_io_are_used_through_the_cache(
    where: str, tmp_path: Path, record: memoryview
) -> None:
    disk = Disk()
    if where == "open":
        disk.opens = [fault(errno.EINVAL)]
    file = SpillFile(tmp_path, RECORD, calls=disk.calls)
    disk.writes = [fault(errno.EINVAL)] if where == "write" and file.direct else []
    file.write(filled(record, 7))
    disk.reads = [fault(errno.EINVAL)] if where == "read" and file.direct else []
    assert file.read(0, filled(record, 0))
    assert set(bytes(record)) == {7}
    assert not file.direct
    assert file.statistics.problems == {}
    file.close()


def test_a_file_that_was_cut_short_is_noticed(tmp_path: Path, record: memoryview) -> None:
    file = SpillFile(tmp_path, RECORD)
    file.write(record)
    os.truncate(file.path, 4096)
    assert not file.read(0, record)
    assert file.statistics.problems == {"the spill file ends too early": 1}
    file.close()


def test_a_directory_that_cannot_be_used_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match=r"cannot use the spill directory .*file.*; choose another --spill-dir"):
        SpillFile(tmp_path / "file", RECORD)


LEAVE = """
import os, sys
from pathlib import Path
from batchgen_lite.offload.spill_file import SpillFile
from batchgen_lite.offload.arena import Arena
file = SpillFile(Path(sys.argv[1]), 5000)
file.write(Arena(8192).view)
print(file.path, flush=True)
sys.stdin.read()
os.kill(os.getpid(), 9)
"""


def test_what_a_killed_run_left_is_removed_and_what_a_live_one_has_is_not(tmp_path: Path, record: memoryview) -> None:
    """Another process has the directory too, and is then killed without a chance to tidy up."""
    command = [sys.executable, "-P", "-c", LEAVE, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        theirs = Path(other.stdout.readline().strip())
        assert theirs.stat().st_size == 8192
        (tmp_path / "batchgen-lite-notes.txt").write_text("not ours to remove")
        mine = SpillFile(tmp_path, RECORD)
        assert mine.removed == 0
        assert remove_abandoned(tmp_path) == 0  # neither theirs nor mine
        assert theirs.exists()
        assert mine.write(record) == 0
        other.communicate("")
    assert other.returncode == -9
    assert theirs.exists()
    next_one = SpillFile(tmp_path, RECORD)
    assert next_one.removed == 1
    assert not theirs.exists()
    assert mine.read(0, record)
    mine.close()
    next_one.close()
    assert [path.name for path in tmp_path.iterdir()] == ["batchgen-lite-notes.txt"]


def test_a_file_that_was_removed_between_creation_and_lock_is_made_again(tmp_path: Path) -> None:
    """Another run's clean-up finds the new file before its owner has locked it."""
    paths = []

    def opening(path: Path, flags: int, mode: int) -> int:
        fd = os.open(path, flags, mode)
        paths.append(path)
        if len(paths) == 1:
            assert remove_abandoned(tmp_path) == 1
        return fd

    file = SpillFile(tmp_path, RECORD, calls=SpillCalls(open=opening))
    assert file.path.exists()
    assert file.path == paths[-1] != paths[0]
    file.close()


def test_a_directory_on_tmpfs(record: memoryview) -> None:
    """Whether it takes direct IO is up to the kernel's age; both do."""
    file = SpillFile(Path("/dev/shm"), RECORD)
    try:
        assert file.write(filled(record, 9)) == 0
        assert file.read(0, filled(record, 0))
        assert set(bytes(record)) == {9}
    finally:
        file.close()
    assert not file.path.exists()


def test_a_link_in_the_directory_is_not_followed(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("data")
    (tmp_path / "batchgen-lite-1-abc.spill").symlink_to(precious)
    SpillFile(tmp_path, RECORD).close()
    assert precious.read_text() == "data"
