"""What a reader is: it brings byte ranges of checkpoint files into host memory, several at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class ReadPiece:
    """``nbytes`` bytes at ``offset`` of file number ``file``, to be written to ``dest`` (writable, C-contiguous).

    The owner of ``dest`` guarantees room for aligned over-reads: the ``offset % alignment`` bytes before it and the
    bytes up to the next aligned file offset behind it belong to the same arena and may be overwritten, and
    ``address(dest) % alignment == offset % alignment``; so O_DIRECT reads land in place. A piece that breaks the
    congruence is still read rightly, through a bounce buffer.
    """

    file: int
    offset: int
    nbytes: int
    dest: memoryview


class Reader(Protocol):
    """Asynchronous reads by a small pool of threads. Thread-safe."""

    name: str
    alignment: int

    def submit(self, pieces: Sequence[ReadPiece], done: Callable[[BaseException | None], None]) -> None:
        """Queue the pieces; ``done`` is called once, from a reader thread, when all are in memory (None) or one has
        failed (a StorageError that names file and offset). Earlier submissions are served first."""
        ...

    def close(self) -> None:
        """Finish or drop queued reads, end the threads, close the files. Idempotent."""
        ...
