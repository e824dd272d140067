"""How much of the disk the reader gets, and how much of the reader the weight stream gets.

    python bench/bench_reader.py [--folder DIR] [--mib 512] [--threads 4]

Three ways through the same file in turns: a plain loop of parallel O_DIRECT reads, the reader fed eight megabytes at a
time, and the weight stream over its ring with nothing computed. Each is the next one's reference. Where the folder's
file system refuses O_DIRECT, as memory does, all three read through the page cache and the figures tell what the code
costs. To see a slow disk: ``python bench/limits.py --read-rate 400MB --disk DIR -- python bench/bench_reader.py ...``.
"""

from __future__ import annotations

import argparse
import mmap
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from figures import Figure, show

from batchgen_lite.offload.arena import Arena
from batchgen_lite.offload.checkpoint.tensors import Extent
from batchgen_lite.offload.readers.direct import DirectReader
from batchgen_lite.offload.readers.protocol import ReadPiece
from batchgen_lite.offload.ring import Ring
from batchgen_lite.offload.stream import WeightStream
from batchgen_lite.offload.tiles import SHARED_EXPERT, Module, Tile

MIB = 1 << 20
BLOCK = 4 * MIB  # the reader's default
TILE = 8 * MIB
SLOTS = 4


class PlainMatrix:
    """Rows of 4 KiB somewhere in the file; nobody decodes them here."""

    cols = 4096
    row_step = decode_step = outputs_per_row = 1
    encoding = "U8"

    def __init__(self, offset: int, rows: int) -> None:
        self.offset, self.rows = offset, rows

    def extents(self, start: int, stop: int) -> tuple[Extent, ...]:
        return (Extent(0, self.offset + start * self.cols, (stop - start) * self.cols),)

    def decode(
        self, parts: Sequence[torch.Tensor], span: tuple[int, int], rows: tuple[int, int], out: torch.Tensor
    ) -> None:
        raise NotImplementedError

    def view(self, parts: Sequence[torch.Tensor], span: tuple[int, int]) -> torch.Tensor | None:
        return None


def write_file(path: Path, mib: int) -> None:
    """Random bytes: what compresses or is all zeros may be read faster than weights."""
    block = os.urandom(MIB)
    with open(path, "wb") as file:
        for _ in range(mib):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def bare_seconds(path: Path, nbytes: int, threads: int) -> float:
    """Every block once, by ``threads`` threads that do nothing else."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
        os.preadv(fd, [mmap.mmap(-1, 4096)], 0)
    except OSError:
        fd = os.open(path, os.O_RDONLY)
    local = threading.local()

    def read(offset: int) -> None:
        if not hasattr(local, "buffer"):
            local.buffer = mmap.mmap(-1, BLOCK)
        os.preadv(fd, [local.buffer], offset)

    with ThreadPoolExecutor(threads) as pool:
        started = time.perf_counter()
        list(pool.map(read, range(0, nbytes, BLOCK)))
        seconds = time.perf_counter() - started
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)
    return seconds


def reader_seconds(path: Path, nbytes: int, threads: int) -> float:
    """The same through the reader, ``SLOTS`` submissions of ``TILE`` bytes in flight."""
    reader = DirectReader([path], threads=threads, block_bytes=BLOCK)
    arena = Arena(SLOTS * TILE)
    free = threading.Semaphore(SLOTS)
    errors: list[BaseException] = []

    def done(error: BaseException | None) -> None:
        if error is not None:
            errors.append(error)
        free.release()

    started = time.perf_counter()
    for number, offset in enumerate(range(0, nbytes, TILE)):
        free.acquire()
        piece = ReadPiece(0, offset, min(TILE, nbytes - offset), arena.view, number % SLOTS * TILE)
        reader.submit([piece], done)
    for _ in range(SLOTS):
        free.acquire()
    seconds = time.perf_counter() - started
    reader.close()
    arena.close()
    if errors:
        raise errors[0]
    return seconds


def modules(nbytes: int) -> Iterator[Module]:
    for index, offset in enumerate(range(0, nbytes, TILE)):
        rows = min(TILE, nbytes - offset) // PlainMatrix.cols
        matrix = PlainMatrix(offset, rows)
        tile = Tile(index, "linear", matrix, 0, rows, SHARED_EXPERT, matrix.extents(0, rows))
        yield Module(index, "qkv", index, (tile,), False, tile.nbytes)


def stream_seconds(path: Path, nbytes: int, threads: int) -> float:
    """The same as a sweep over modules of one tile each, through a ring of ``SLOTS`` tiles; nothing is computed. The
    second sweep, for which the first has read ahead as far as the ring goes."""
    reader = DirectReader([path], threads=threads, block_bytes=BLOCK)
    ring = Ring(Arena(SLOTS * (TILE + 2 * reader.alignment)), reader.alignment)
    stream = WeightStream(tuple(modules(nbytes)), reader, ring)
    seconds = 0.0
    for _ in range(2):
        started = time.perf_counter()
        stream.begin_sweep(1)
        for module in stream.modules:
            for _tile, parts in stream.tiles(module):
                del parts
        seconds = time.perf_counter() - started
    stream.close()
    reader.close()
    ring.arena.close()
    return seconds


def measure(folder: Path | None = None, mib: int = 256, threads: int = 4, repeats: int = 3) -> list[Figure]:
    """For ``bench/run.py``. The three take turns, so that a disk that changes its mind is fair to all."""
    ways: dict[str, Callable[[Path, int, int], float]] = {
        "bare": bare_seconds,
        "reader": reader_seconds,
        "stream": stream_seconds,
    }
    nbytes = mib * MIB
    with tempfile.TemporaryDirectory(dir=folder) as there:
        path = Path(there, "weights")
        write_file(path, mib)
        seconds = {name: float("inf") for name in ways}
        for _ in range(repeats):
            for name, way in ways.items():
                seconds[name] = min(seconds[name], way(path, nbytes, threads))
    return [
        Figure(f"{name}, bytes", mib / seconds[name], "MiB/s", seconds[name] / seconds[reference])
        for name, reference in (("reader", "bare"), ("stream", "reader"))
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description="Reader and weight stream against a bare loop of reads.")
    parser.add_argument("--folder", type=Path, help="on the disk to measure  [default: the temporary folder]")
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--threads", type=int, default=4)
    arguments = parser.parse_args()
    show(measure(arguments.folder, arguments.mib, arguments.threads))


if __name__ == "__main__":
    main()
