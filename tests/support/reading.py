"""What tests of readers share: a file of known bytes, a submission that is waited for, and a disk that misbehaves."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import random
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from batchgen_lite.offload.readers.files import SystemCalls
from batchgen_lite.offload.readers.protocol import Reader, ReadPiece

DEADLINE = 120.0
"""Seconds after which a reader that never calls back counts as stuck."""


def write_file(path: Path, nbytes: int, seed: int = 0, *, on_disk: bool = False) -> bytes:
    """A file of ``nbytes`` random bytes; ``on_disk`` waits until they are there (dirty pages could not be dropped from
    the page cache)."""
    content = random.Random(seed).randbytes(nbytes)
    with path.open("wb") as file:
        file.write(content)
        if on_disk:
            file.flush()
            os.fsync(file.fileno())
    return content


def submit_and_wait(reader: Reader, pieces: Sequence[ReadPiece]) -> BaseException | None:
    """The error that the submission ended with."""
    finished = threading.Event()
    outcome: list[BaseException | None] = []

    def done(error: BaseException | None) -> None:
        outcome.append(error)
        finished.set()

    reader.submit(pieces, done)
    assert finished.wait(DEADLINE), "the reader never called back"
    assert len(outcome) == 1
    return outcome[0]


def is_direct(fd: int) -> bool:
    return bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)


def faulty(pread: Callable[[int, memoryview, int], int]) -> SystemCalls:
    """The real system calls, but with this ``pread``."""
    return SystemCalls(pread=pread)


def cached_pages(path: Path) -> int:
    """Pages of the file in the page cache, by mincore(2)."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        with mmap.mmap(file.fileno(), size, mmap.MAP_PRIVATE) as mapped:
            first = ctypes.c_char.from_buffer(mapped)
            present = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
            libc = ctypes.CDLL(None, use_errno=True)
            result = libc.mincore(ctypes.c_void_p(ctypes.addressof(first)), ctypes.c_size_t(size), present)
            del first
            assert result == 0, os.strerror(ctypes.get_errno())
    return sum(byte & 1 for byte in present)
