"""The direct reader against the bytes of the file: positions, over-reads, order, the page cache, statistics."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from reading import DEADLINE, cached_pages, faulty, is_direct, submit_and_wait, write_file

from batchgen_lite.errors import StorageError, UsageError
from batchgen_lite.offload.arena import Arena
from batchgen_lite.offload.checkpoint.tensors import Extent
from batchgen_lite.offload.readers.alignment import direct_alignment
from batchgen_lite.offload.readers.direct import DirectReader
from batchgen_lite.offload.readers.placement import place
from batchgen_lite.offload.readers.protocol import ReadPiece

SIZE = 300_001  # ends inside a block of the disk


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, bytes]:
    folder = tmp_path_factory.mktemp("shards")
    return {folder / f"{number}.bin": write_file(folder / f"{number}.bin", SIZE, number) for number in range(3)}


@pytest.fixture
def arena() -> Iterator[Arena]:
    with Arena(1 << 21) as arena:
        yield arena


def random_extents(generator: random.Random, count: int) -> list[Extent]:
    extents: list[Extent] = []
    for _ in range(count):
        before = extents[-1] if extents else None
        offset, file = generator.randrange(SIZE), generator.randrange(3)
        if before is not None and before.offset + before.nbytes < SIZE and generator.random() < 0.3:
            offset, file = before.offset + before.nbytes, before.file
        nbytes = generator.choice([1, generator.randrange(1, 600), generator.randrange(1, 60_000)])
        extents.append(Extent(file, offset, min(nbytes, SIZE - offset)))
    return extents


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("block_bytes", [4096, 40_000, 4 << 20])
@pytest.mark.parametrize("seed", range(4))
def test_every_byte_arrives_and_no_other_is_touched(
    files: dict[Path, bytes], arena: Arena, direct: bool, block_bytes: int, seed: int
) -> None:
    generator = random.Random(seed)
    extents = random_extents(generator, 12)
    reader = DirectReader(list(files), threads=3, block_bytes=block_bytes, direct=direct)
    try:
        placement = place(extents, reader.alignment, reader.alignment)
        arena.tensor.fill_(0xAA)
        pieces = [
            ReadPiece(e.file, e.offset, e.nbytes, arena.view, p)
            for e, p in zip(extents, placement.positions, strict=True)
        ]
        assert submit_and_wait(reader, pieces) is None
        statistics = reader.statistics()
    finally:
        reader.close()
    contents = list(files.values())
    for extent, position in zip(extents, placement.positions, strict=True):
        wanted = contents[extent.file][extent.offset : extent.offset + extent.nbytes]
        assert bytes(arena.view[position : position + extent.nbytes]) == wanted
    assert bytes(arena.view[: reader.alignment]) == b"\xaa" * reader.alignment
    assert (arena.tensor[placement.end :] == 0xAA).all()
    assert statistics.bounced_bytes == 0
    assert statistics.bytes_asked == sum(extent.nbytes for extent in extents) <= statistics.bytes_read


def test_pieces_that_break_the_congruence_bounce_and_touch_nothing_else(files: dict[Path, bytes], arena: Arena) -> None:
    content = next(iter(files.values()))
    reader = DirectReader(list(files), block_bytes=8192)
    if reader.statistics().buffered_files:
        reader.close()
        pytest.fail("the folder for temporary files refuses O_DIRECT: set TMPDIR to one on a disk")
    small = memoryview(bytearray(100))
    try:
        arena.tensor.fill_(0xAA)
        pieces = [
            ReadPiece(0, 5_000, 50_000, arena.view, 1),  # another remainder
            ReadPiece(0, 10, 100, small, 0),  # no room before it
            ReadPiece(0, SIZE - 7, 7, arena.view, 60_000),  # the end of the file
        ]
        assert submit_and_wait(reader, pieces) is None
        assert reader.statistics().bounced_bytes == 50_107
    finally:
        reader.close()
    assert bytes(arena.view[:50_002]) == b"\xaa" + content[5_000:55_000] + b"\xaa"
    assert bytes(small) == content[10:110]
    assert bytes(arena.view[59_999:60_008]) == b"\xaa" + content[-7:] + b"\xaa"


def test_neighbouring_pieces_are_one_read_and_large_ones_several(files: dict[Path, bytes], arena: Arena) -> None:
    reader = DirectReader(list(files), block_bytes=65_536)
    try:
        pieces = [ReadPiece(0, 4096 * i, 4096, arena.view, 4096 * i) for i in range(16)]
        assert submit_and_wait(reader, pieces) is None
        assert reader.statistics().reads == 1
        assert submit_and_wait(reader, [ReadPiece(1, 0, 262_144, arena.view, 0)]) is None
        assert reader.statistics().reads == 5
    finally:
        reader.close()


def test_submissions_are_served_in_order_and_counted_as_busy(files: dict[Path, bytes], arena: Arena) -> None:
    served: list[int] = []
    gate = threading.Event()

    def pread(fd: int, target: memoryview, offset: int) -> int:
        assert gate.wait(DEADLINE)
        served.append(offset)
        return os.preadv(fd, [target], offset)

    reader = DirectReader(list(files), threads=1, block_bytes=4096, calls=faulty(pread))
    finished: list[int] = []
    try:
        last = threading.Event()
        for number in range(4):
            pieces = [ReadPiece(0, 32_768 * number + 4096 * i, 4096, arena.view, 8192 * i) for i in range(3)]

            def done(error: BaseException | None, number: int = number) -> None:
                assert error is None
                finished.append(number)
                if number == 3:
                    last.set()

            reader.submit(pieces, done)
        assert reader.statistics().busy_seconds > 0, "a submission in flight counts before it is done"
        gate.set()
        assert last.wait(DEADLINE)
        statistics = reader.statistics()
        assert statistics.submissions == 4
        assert statistics.reads == 12
        assert statistics.bytes_per_second == statistics.bytes_read / statistics.busy_seconds
        assert reader.statistics().busy_seconds == statistics.busy_seconds, "an idle reader is not busy"
    finally:
        gate.set()
        reader.close()
    assert finished == [0, 1, 2, 3]
    assert served == sorted(served)


def test_nothing_to_read_is_done_at_once(files: dict[Path, bytes], arena: Arena) -> None:
    reader = DirectReader(list(files))
    try:
        assert submit_and_wait(reader, []) is None
        assert submit_and_wait(reader, [ReadPiece(0, 5, 0, arena.view, 5)]) is None
        assert reader.statistics().reads == 0
    finally:
        reader.close()


@pytest.mark.parametrize("direct", [True, False])
def test_no_page_cache_is_left_behind(tmp_path: Path, direct: bool) -> None:
    path = tmp_path / "cached.bin"
    nbytes = (8 << 20) + 1234
    content = write_file(path, nbytes, on_disk=True)
    path.read_bytes()
    assert cached_pages(path) > 2000
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    assert cached_pages(path) == 0, "the file system of the folder for temporary files cannot drop its cache"
    with Arena(nbytes + 8192) as arena:
        reader = DirectReader([path], block_bytes=1 << 20, direct=direct)
        try:
            assert submit_and_wait(reader, [ReadPiece(0, 777, nbytes - 777, arena.view, 777)]) is None
            # Scattered pieces: read-ahead must not fetch what nobody asked for.
            pieces = [ReadPiece(0, at, 8192, arena.view, at) for at in range(0, nbytes - 8192, 1 << 18)]
            assert submit_and_wait(reader, pieces) is None
            # Boundary pages that two threads read at the same time may stay until the file is closed.
            assert cached_pages(path) <= 16
        finally:
            reader.close()
        assert bytes(arena.view[:8192]) == content[:8192]
        assert bytes(arena.view[777:nbytes]) == content[777:]
    assert cached_pages(path) == 0


def test_many_shards_with_few_descriptors(tmp_path: Path, arena: Arena) -> None:
    contents = [write_file(tmp_path / f"{number}.bin", 5_000, number) for number in range(40)]
    reader = DirectReader(sorted(tmp_path.iterdir(), key=lambda path: int(path.stem)), threads=4, max_open=5)
    before = len(os.listdir("/proc/self/fd"))
    try:
        for _ in range(2):
            pieces = [ReadPiece(i, 0, 5_000, arena.view, i * 8192) for i in range(40)]
            assert submit_and_wait(reader, pieces) is None
            assert len(os.listdir("/proc/self/fd")) - before <= 5
            assert [bytes(arena.view[i * 8192 : i * 8192 + 5_000]) for i in range(40)] == contents
    finally:
        reader.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_direct_files_are_read_directly_at_the_alignment_that_the_kernel_names(
    files: dict[Path, bytes], arena: Arena
) -> None:
    calls: list[tuple[bool, int, int]] = []

    def pread(fd: int, target: memoryview, offset: int) -> int:
        calls.append((is_direct(fd), len(target), offset))
        return os.preadv(fd, [target], offset)

    reader = DirectReader(list(files), calls=faulty(pread))
    try:
        assert submit_and_wait(reader, [ReadPiece(0, 5_000, 10, arena.view, 5_000)]) is None
    finally:
        reader.close()
    alignment = direct_alignment(next(iter(files))) or 4096
    assert calls == [(True, alignment, 5_000 - 5_000 % alignment)]


def test_closing_drops_what_is_queued_and_says_so(files: dict[Path, bytes], arena: Arena) -> None:
    started, gate = threading.Event(), threading.Event()

    def pread(fd: int, target: memoryview, offset: int) -> int:
        started.set()
        assert gate.wait(DEADLINE)
        return os.preadv(fd, [target], offset)

    reader = DirectReader(list(files), threads=1, block_bytes=4096, calls=faulty(pread))
    outcomes: list[BaseException | None] = []
    reader.submit([ReadPiece(0, 0, 4096, arena.view, 0)], outcomes.append)
    reader.submit([ReadPiece(0, 4096, 8192, arena.view, 4096)], outcomes.append)
    assert started.wait(DEADLINE)
    closer = threading.Thread(target=reader.close)
    closer.start()
    while not reader._closing:  # close() sets it before it waits for the threads
        pass
    gate.set()
    closer.join(DEADLINE)
    assert outcomes[0] is None
    assert isinstance(outcomes[1], StorageError)
    assert "closed before" in str(outcomes[1])
    reader.close()
    reader.submit([ReadPiece(0, 0, 1, arena.view, 0)], outcomes.append)
    assert "the reader is closed" in str(outcomes[2])


def test_a_callback_may_close_the_reader_and_a_broken_one_is_reported(
    files: dict[Path, bytes], arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    reported: list[object] = []
    monkeypatch.setattr(threading, "excepthook", lambda arguments: reported.append(arguments.exc_value))
    reader = DirectReader(list(files), threads=1)

    def broken(error: BaseException | None) -> None:
        raise RuntimeError("a fault of the caller")

    reader.submit([ReadPiece(0, 0, 10, arena.view, 0)], broken)
    assert submit_and_wait(reader, [ReadPiece(0, 0, 10, arena.view, 0)]) is None
    assert [str(fault) for fault in reported] == ["a fault of the caller"]
    closed = threading.Event()
    reader.submit([ReadPiece(0, 0, 10, arena.view, 0)], lambda error: (reader.close(), closed.set())[1])
    assert closed.wait(DEADLINE)


@pytest.mark.parametrize(
    ("piece", "message"),
    [
        ((3, 0, 1, 0), "file number 3, but the reader has 3 files"),
        ((0, -1, 1, 0), "negative"),
        ((0, 0, 11, 90), "outside an arena of 100"),
    ],
)
def test_impossible_pieces_are_refused(
    files: dict[Path, bytes], piece: tuple[int, int, int, int], message: str
) -> None:
    file, offset, nbytes, position = piece
    reader = DirectReader(list(files))
    try:
        with pytest.raises(ValueError, match=message):
            reader.submit([ReadPiece(file, offset, nbytes, memoryview(bytearray(100)), position)], print)
        with pytest.raises(ValueError, match="writable"):
            reader.submit([ReadPiece(0, 0, 1, memoryview(bytes(10)), 0)], print)
    finally:
        reader.close()


def test_settings_out_of_range_are_usage_errors(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="0 reader threads; from 1 to 256"):
        DirectReader([], threads=0)
    with pytest.raises(UsageError, match="read blocks of 2147483648 bytes"):
        DirectReader([], block_bytes=1 << 31)
    with pytest.raises(StorageError, match=r"cannot open .*missing.bin: No such file"):
        DirectReader([tmp_path / "missing.bin"])
