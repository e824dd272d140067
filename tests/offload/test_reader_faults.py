"""Disks that misbehave: short and interrupted reads, refusals of O_DIRECT, read errors, files that change under a run.

Either the bytes are the file's, or the submission ends with a StorageError that names the file; never anything else.
"""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from reading import faulty, is_direct, submit_and_wait, write_file

from batchgen_lite.errors import StorageError
from batchgen_lite.offload.arena import Arena
from batchgen_lite.offload.readers.direct import DirectReader
from batchgen_lite.offload.readers.files import SystemCalls, identify
from batchgen_lite.offload.readers.protocol import ReadPiece

PRead = Callable[[int, memoryview, int], int]
SIZE = 20_001


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write_file(tmp_path / "shard.bin", SIZE)
    return tmp_path / "shard.bin"


def read_all(path: Path, calls: SystemCalls | None = None, block_bytes: int = 8192) -> tuple[bytes, DirectReader]:
    """Bytes 100 to the end through a reader, which is closed; raises the submission's error."""
    reader = DirectReader([path], threads=2, block_bytes=block_bytes, calls=calls)
    with Arena(65_536) as arena:
        try:
            error = submit_and_wait(reader, [ReadPiece(0, 100, SIZE - 100, arena.view, 4096 + 100)])
        finally:
            reader.close()
        if error is not None:
            raise error
        return bytes(arena.view[4196 : 4096 + SIZE]), reader


@pytest.mark.parametrize("most", [1000, 4096, 4097, 8191, 512, 3 * 4096, 1])
@pytest.mark.parametrize("direct", [True, False])
def test_short_reads_anywhere(path: Path, most: int, direct: bool) -> None:
    def pread(fd: int, target: memoryview, offset: int) -> int:
        # The disk delivers whole blocks; what is reported is less, and the rest of the target is not to be trusted.
        count = min(os.preadv(fd, [target], offset), most)
        target[count:] = b"\xee" * (len(target) - count)
        return count

    reader = DirectReader([path], threads=2, block_bytes=8192, direct=direct, calls=faulty(pread))
    with Arena(65_536) as arena:
        assert submit_and_wait(reader, [ReadPiece(0, 100, SIZE - 100, arena.view, 4196)]) is None
        reader.close()
        assert bytes(arena.view[4196 : 4096 + SIZE]) == path.read_bytes()[100:]


@pytest.mark.parametrize("boundary", range(0, 24_577, 512))
def test_a_read_that_stops_at_any_one_boundary(path: Path, boundary: int) -> None:
    def pread(fd: int, target: memoryview, offset: int) -> int:
        limit = boundary - offset if offset < boundary < offset + len(target) else len(target)
        return os.preadv(fd, [target[:limit]], offset)

    assert read_all(path, faulty(pread))[0] == path.read_bytes()[100:]


def test_interrupted_reads_are_repeated(path: Path) -> None:
    turns = iter(range(1000))

    def pread(fd: int, target: memoryview, offset: int) -> int:
        if next(turns) % 2 == 0:
            raise InterruptedError(errno.EINTR, "Interrupted system call")
        return os.preadv(fd, [target], offset)

    assert read_all(path, faulty(pread))[0] == path.read_bytes()[100:]


def refuse_at_open(path: Path, flags: int) -> int:
    if flags & os.O_DIRECT:
        raise OSError(errno.EINVAL, "Invalid argument")
    return os.open(path, flags)


def refuse_at_read(number: int) -> PRead:
    def pread(fd: int, target: memoryview, offset: int) -> int:
        if is_direct(fd):
            raise OSError(number, os.strerror(number))
        return os.preadv(fd, [target], offset)

    return pread


@pytest.mark.parametrize(
    "calls",
    [SystemCalls(open=refuse_at_open), faulty(refuse_at_read(errno.EINVAL)), faulty(refuse_at_read(errno.EOPNOTSUPP))],
    ids=["at open", "at read EINVAL", "at read EOPNOTSUPP"],
)
def test_a_file_system_without_direct_io_is_read_through_the_cache(path: Path, calls: SystemCalls) -> None:
    content, reader = read_all(path, calls)
    assert content == path.read_bytes()[100:]
    statistics = reader.statistics()
    assert statistics.buffered_files == 1
    assert str(path) in statistics.fallback_reason
    assert "O_DIRECT" in statistics.fallback_reason


def test_one_refusing_file_leaves_the_others_direct(path: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.bin"
    write_file(other, SIZE, 1)
    refusing = path.stat().st_ino
    modes: set[tuple[bool, bool]] = set()

    def pread(fd: int, target: memoryview, offset: int) -> int:
        first = os.fstat(fd).st_ino == refusing
        if first and is_direct(fd):
            raise OSError(errno.EINVAL, "Invalid argument")
        modes.add((first, is_direct(fd)))
        return os.preadv(fd, [target], offset)

    reader = DirectReader([path, other], calls=faulty(pread))
    with Arena(65_536) as arena:
        pieces = [ReadPiece(0, 0, SIZE, arena.view, 0), ReadPiece(1, 0, SIZE, arena.view, 32_768)]
        assert submit_and_wait(reader, pieces) is None
        reader.close()
        assert bytes(arena.view[:SIZE]) == path.read_bytes()
        assert bytes(arena.view[32_768 : 32_768 + SIZE]) == other.read_bytes()
    assert modes == {(True, False), (False, True)}


def test_a_read_error_on_one_extent_names_file_and_offset_and_spares_the_others(path: Path) -> None:
    def pread(fd: int, target: memoryview, offset: int) -> int:
        if offset <= 12_288 < offset + len(target):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return os.preadv(fd, [target], offset)

    reader = DirectReader([path], threads=2, block_bytes=4096, calls=faulty(pread))
    with Arena(65_536) as arena:
        error = submit_and_wait(reader, [ReadPiece(0, 0, SIZE, arena.view, 0)])
        assert isinstance(error, StorageError)
        assert "4096 bytes at offset 12288" in str(error)
        assert str(path) in str(error)
        assert "Input/output error" in str(error)
        assert submit_and_wait(reader, [ReadPiece(0, 0, 12_288, arena.view, 0)]) is None
        assert reader.statistics().bytes_asked == 12_288
        reader.close()


def test_a_failed_submission_calls_back_only_when_no_thread_writes_to_it_any_more(path: Path) -> None:
    slow, failed = threading.Event(), threading.Event()
    writing: list[int] = []

    def pread(fd: int, target: memoryview, offset: int) -> int:
        if offset == 0:
            assert slow.wait(30)
            writing.append(offset)
            return os.preadv(fd, [target], offset)
        failed.set()
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    reader = DirectReader([path], threads=2, block_bytes=4096, calls=faulty(pread))
    outcome: list[tuple[BaseException | None, list[int]]] = []
    with Arena(65_536) as arena:
        finished = threading.Event()
        reader.submit(
            [ReadPiece(0, 0, SIZE, arena.view, 0)],
            lambda error: (outcome.append((error, list(writing))), finished.set())[1],
        )
        assert failed.wait(30)
        assert not outcome
        slow.set()
        assert finished.wait(30)
        reader.close()
    assert isinstance(outcome[0][0], StorageError)
    assert outcome[0][1] == [0]


def test_a_truncated_file_is_named_with_the_offset_where_it_ends(path: Path) -> None:
    was = identify(path)
    os.truncate(path, 10_000)
    reader = DirectReader([path], threads=1, block_bytes=4096)
    with Arena(65_536) as arena:
        error = submit_and_wait(reader, [ReadPiece(0, 0, was.size, arena.view, 0)])
    reader.close()
    assert isinstance(error, StorageError)
    assert f"{path} ends at offset 10000" in str(error)
    assert "truncated" in str(error)


def overwrite(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(6_000)
        file.write(b"other weights")


def touch_into_the_past(path: Path) -> None:
    overwrite(path)
    os.utime(path, ns=(0, 0))


def replace(path: Path) -> None:
    new = path.with_suffix(".new")
    write_file(new, SIZE, 7)
    os.utime(new, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns))
    new.replace(path)


def truncate(path: Path) -> None:
    os.truncate(path, 9_000)


def grow(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"x")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (overwrite, "it was written to"),
        (touch_into_the_past, "it was written to"),
        (truncate, "9000"),
        (grow, f"it has {SIZE + 1} bytes instead of {SIZE}"),
    ],
)
@pytest.mark.parametrize("direct", [True, False])
def test_a_file_changed_under_the_run_is_detected(
    path: Path, change: Callable[[Path], None], said: str, direct: bool
) -> None:
    # An hour old: a change within the same tick of the file system's clock would be invisible, and is not the point.
    os.utime(path, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns - 3_600_000_000_000))
    reader = DirectReader([path], direct=direct)
    with Arena(65_536) as arena:
        whole = [ReadPiece(0, 0, SIZE, arena.view, 0)]
        assert submit_and_wait(reader, whole) is None
        change(path)
        error = submit_and_wait(reader, whole)
        reader.close()
    assert isinstance(error, StorageError)
    assert said in str(error)
    assert str(path) in str(error)


def test_a_replaced_file_is_read_from_the_old_one_or_refused(path: Path, tmp_path: Path) -> None:
    old = path.read_bytes()
    other = tmp_path / "other.bin"
    write_file(other, SIZE, 1)
    reader = DirectReader([path, other], max_open=1)
    with Arena(65_536) as arena:
        whole = [ReadPiece(0, 0, SIZE, arena.view, 0)]
        assert submit_and_wait(reader, whole) is None
        replace(path)
        arena.tensor.zero_()
        assert submit_and_wait(reader, whole) is None
        assert bytes(arena.view[:SIZE]) == old, "the descriptor still holds the file that was indexed"
        assert submit_and_wait(reader, [ReadPiece(1, 0, SIZE, arena.view, 0)]) is None
        error = submit_and_wait(reader, whole)  # opened anew
        reader.close()
    assert isinstance(error, StorageError)
    assert "replaced by another file" in str(error)


def test_a_file_other_than_the_indexed_one_is_refused(path: Path) -> None:
    indexed = identify(path)
    replace(path)
    reader = DirectReader([path], expected=[indexed])
    with Arena(65_536) as arena:
        error = submit_and_wait(reader, [ReadPiece(0, 0, SIZE, arena.view, 0)])
        reader.close()
    assert isinstance(error, StorageError)
    assert "replaced by another file" in str(error)


def test_a_file_that_vanishes_before_its_first_read(path: Path) -> None:
    reader = DirectReader([path])
    path.unlink()
    with Arena(65_536) as arena:
        error = submit_and_wait(reader, [ReadPiece(0, 0, SIZE, arena.view, 0)])
        reader.close()
    assert isinstance(error, StorageError)
    assert f"cannot open {path}: No such file" in str(error)


def test_no_descriptor_left_says_how_to_raise_the_limit(path: Path) -> None:
    def refuse(path: Path, flags: int) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with pytest.raises(StorageError, match=r"Too many open files; this process may hold \d+ files open.*ulimit -n"):
        read_all(path, SystemCalls(open=refuse))


_LIMITED = """
import os, resource, sys, threading
from pathlib import Path
from batchgen_lite.offload.readers.direct import DirectReader
from batchgen_lite.offload.readers.protocol import ReadPiece

resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
shards = sorted(Path(sys.argv[1]).iterdir())
reader = DirectReader(shards, threads=4)
taken = []
try:  # the rest of the program then takes nearly all that is left
    while True:
        taken.append(os.open(os.devnull, os.O_RDONLY))
except OSError:
    for fd in taken[-2:]:
        os.close(fd)
arena = bytearray(4096 * (len(shards) + 1))
outcome, finished = [], threading.Event()
view = memoryview(arena)
pieces = [ReadPiece(i, 0, 1000, view, 4096 * i) for i in range(len(shards))]
reader.submit(pieces, lambda error: (outcome.append(error), finished.set()))
assert finished.wait(30)
if outcome[0] is not None:
    raise outcome[0]
for fd in taken[:-2]:
    os.close(fd)
for i, shard in enumerate(shards):
    assert arena[4096 * i : 4096 * i + 1000] == shard.read_bytes(), shard
print("read", len(shards))
"""


def test_an_open_file_limit_of_64_with_more_shards_than_that(tmp_path: Path) -> None:
    for number in range(100):
        write_file(tmp_path / f"{number:03}.bin", 1000, number)
    result = subprocess.run(
        [sys.executable, "-c", _LIMITED, str(tmp_path)], capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout == "read 100\n"


def test_a_read_only_model_directory(path: Path) -> None:
    path.chmod(0o444)
    path.parent.chmod(0o555)
    try:
        assert read_all(path)[0] == path.read_bytes()[100:]
        assert [entry.name for entry in path.parent.iterdir()] == [path.name]
    finally:
        path.parent.chmod(0o755)


def test_files_on_tmpfs() -> None:
    shared_memory = Path("/dev/shm")
    path = shared_memory / f"batchgen-lite-test-{os.getpid()}.bin"
    try:
        content = write_file(path, SIZE)
        assert read_all(path)[0] == content[100:]
    finally:
        path.unlink(missing_ok=True)
