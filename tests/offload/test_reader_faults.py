"""Disks that misbehave: short and interrupted reads, refusals of O_DIRECT, read errors, few descriptors.

Either the bytes are the file's, or the submission ends with a StorageError that names the file; never anything else.
"""

from __future__ import annotations

import errno
import os
import random
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from reading import DEADLINE, faulty, is_direct, submit_and_wait, write_file

from batchgen_lite.errors import StorageError
from batchgen_lite.offload.arena import Arena
from batchgen_lite.offload.readers.direct import DirectReader
from batchgen_lite.offload.readers.files import SystemCalls
from batchgen_lite.offload.readers.protocol import ReadPiece

PRead = Callable[[int, memoryview, int], int]
SIZE = 20_001


@pytest.fixture(scope="module")
def shard(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file that no test changes."""
    path = tmp_path_factory.mktemp("shards") / "shard.bin"
    write_file(path, SIZE)
    return path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file of a test's own, to be damaged."""
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
def test_short_reads_anywhere(shard: Path, most: int, direct: bool) -> None:
    def pread(fd: int, target: memoryview, offset: int) -> int:
        # The disk delivers whole blocks; what is reported is less, and the rest of the target is not to be trusted.
        count = min(os.preadv(fd, [target], offset), most)
        target[count:] = b"\xee" * (len(target) - count)
        return count

    reader = DirectReader([shard], threads=2, block_bytes=8192, direct=direct, calls=faulty(pread))
    with Arena(65_536) as arena:
        assert submit_and_wait(reader, [ReadPiece(0, 100, SIZE - 100, arena.view, 4196)]) is None
        reader.close()
        assert bytes(arena.view[4196 : 4096 + SIZE]) == shard.read_bytes()[100:]


@pytest.mark.parametrize("boundary", range(0, 24_577, 512))
def test_a_read_that_stops_at_any_one_boundary(shard: Path, boundary: int) -> None:
    def pread(fd: int, target: memoryview, offset: int) -> int:
        limit = boundary - offset if offset < boundary < offset + len(target) else len(target)
        return os.preadv(fd, [target[:limit]], offset)

    assert read_all(shard, faulty(pread))[0] == shard.read_bytes()[100:]


def test_interrupted_reads_are_repeated(shard: Path) -> None:
    turns = iter(range(1000))

    def pread(fd: int, target: memoryview, offset: int) -> int:
        if next(turns) % 2 == 0:
            raise InterruptedError(errno.EINTR, "Interrupted system call")
        return os.preadv(fd, [target], offset)

    assert read_all(shard, faulty(pread))[0] == shard.read_bytes()[100:]


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
def test_a_file_system_without_direct_io_is_read_through_the_cache(shard: Path, calls: SystemCalls) -> None:
    content, reader = read_all(shard, calls)
    assert content == shard.read_bytes()[100:]
    statistics = reader.statistics()
    assert statistics.buffered_files == 1
    assert str(shard) in statistics.fallback_reason
    assert "O_DIRECT" in statistics.fallback_reason


def test_one_refusing_file_leaves_the_others_direct(shard: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.bin"
    write_file(other, SIZE, 1)
    refusing = shard.stat().st_ino
    modes: set[tuple[bool, bool]] = set()

    def pread(fd: int, target: memoryview, offset: int) -> int:
        first = os.fstat(fd).st_ino == refusing
        if first and is_direct(fd):
            raise OSError(errno.EINVAL, "Invalid argument")
        modes.add((first, is_direct(fd)))
        return os.preadv(fd, [target], offset)

    reader = DirectReader([shard, other], calls=faulty(pread))
    with Arena(65_536) as arena:
        pieces = [ReadPiece(0, 0, SIZE, arena.view, 0), ReadPiece(1, 0, SIZE, arena.view, 32_768)]
        assert submit_and_wait(reader, pieces) is None
        reader.close()
        assert bytes(arena.view[:SIZE]) == shard.read_bytes()
        assert bytes(arena.view[32_768 : 32_768 + SIZE]) == other.read_bytes()
    assert modes == {(True, False), (False, True)}


def test_a_read_error_on_one_extent_names_file_and_offset_and_spares_the_others(shard: Path) -> None:
    def pread(fd: int, target: memoryview, offset: int) -> int:
        if offset <= 12_288 < offset + len(target):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return os.preadv(fd, [target], offset)

    reader = DirectReader([shard], threads=2, block_bytes=4096, calls=faulty(pread))
    with Arena(65_536) as arena:
        error = submit_and_wait(reader, [ReadPiece(0, 0, SIZE, arena.view, 0)])
        assert isinstance(error, StorageError)
        assert "4096 bytes at offset 12288" in str(error)
        assert str(shard) in str(error)
        assert "Input/output error" in str(error)
        assert submit_and_wait(reader, [ReadPiece(0, 0, 12_288, arena.view, 0)]) is None
        assert reader.statistics().bytes_asked == 12_288
        reader.close()


def test_a_failed_submission_calls_back_only_when_no_thread_writes_to_it_any_more(shard: Path) -> None:
    slow, failed = threading.Event(), threading.Event()
    writing: list[int] = []

    def pread(fd: int, target: memoryview, offset: int) -> int:
        if offset == 0:
            assert slow.wait(DEADLINE)
            writing.append(offset)
            return os.preadv(fd, [target], offset)
        failed.set()
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    reader = DirectReader([shard], threads=2, block_bytes=4096, calls=faulty(pread))
    outcome: list[tuple[BaseException | None, list[int]]] = []
    with Arena(65_536) as arena:
        finished = threading.Event()
        reader.submit(
            [ReadPiece(0, 0, SIZE, arena.view, 0)],
            lambda error: (outcome.append((error, list(writing))), finished.set())[1],
        )
        assert failed.wait(DEADLINE)
        assert not outcome
        slow.set()
        assert finished.wait(DEADLINE)
        reader.close()
    assert isinstance(outcome[0][0], StorageError)
    assert outcome[0][1] == [0]


def test_no_descriptor_left_says_how_to_raise_the_limit(shard: Path) -> None:
    def refuse(shard: Path, flags: int) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with pytest.raises(StorageError, match=r"Too many open files; this process may hold \d+ files open.*ulimit -n"):
        read_all(shard, SystemCalls(open=refuse))


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
assert finished.wait(120)
if outcome[0] is not None:
    raise outcome[0]
for fd in taken[:-2]:
    os.close(fd)
for i, shard in enumerate(shards):
    assert arena[4096 * i : 4096 * i + 1000] == shard.read_bytes(), shard
print("read", len(shards))
"""


def test_an_open_file_limit_of_64_with_more_shards_than_that(tmp_path: Path) -> None:
    for number in range(70):
        write_file(tmp_path / f"{number:03}.bin", 1000, number)
    result = subprocess.run(
        [sys.executable, "-c", _LIMITED, str(tmp_path)], capture_output=True, text=True, timeout=300, check=False
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout == "read 70\n"


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


def test_many_submitters_on_a_bad_disk_hear_of_each_submission_exactly_once(shard: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.bin"
    write_file(other, SIZE, 1)
    contents = [shard.read_bytes(), other.read_bytes()]
    luck = random.Random(5)

    def pread(fd: int, target: memoryview, offset: int) -> int:
        chance = luck.random()
        if chance < 0.02:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        if chance < 0.05:
            raise InterruptedError(errno.EINTR, os.strerror(errno.EINTR))
        return os.preadv(fd, [target[: luck.randrange(1, len(target) + 1)] if chance < 0.2 else target], offset)

    reader = DirectReader([shard, other], threads=3, block_bytes=4096, max_open=2, calls=faulty(pread))
    outcomes: list[bool] = []

    def submit_some(seed: int) -> None:
        generator = random.Random(seed)
        with Arena(6 * 32_768) as arena:
            for _ in range(60):
                pieces = [
                    ReadPiece(generator.randrange(2), at, generator.randrange(1, SIZE - at), arena.view, slot + at)
                    for slot in range(0, 6 * 32_768, 32_768)
                    for at in [generator.randrange(SIZE - 1)]
                ]
                error = submit_and_wait(reader, pieces)
                assert error is None or isinstance(error, StorageError)
                if error is None:
                    for piece in pieces:
                        wanted = contents[piece.file][piece.offset : piece.offset + piece.nbytes]
                        assert arena.view[piece.position : piece.position + piece.nbytes] == wanted
                outcomes.append(error is None)

    faults: list[BaseException] = []

    def guarded(seed: int) -> None:
        try:
            submit_some(seed)
        except BaseException as fault:
            faults.append(fault)

    threads = [threading.Thread(target=guarded, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    statistics = reader.statistics()
    reader.close()
    assert not faults
    assert len(outcomes) == statistics.submissions == 240
    assert 0 < sum(outcomes) < 240, "the disk was meant to fail sometimes, not always"
