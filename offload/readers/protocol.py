"""What a reader is: it brings byte ranges of checkpoint files into host memory, several at a time.

A piece names its destination as (arena, position), not as an exact slice, because a direct read must cover whole
blocks of the disk: it writes up to ``alignment - 1`` bytes before and behind the bytes that were asked for. Positions
that satisfy the contract of ``ReadPiece`` come from ``placement.place``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class ReadPiece:
    """``nbytes`` bytes at ``offset`` of file number ``file``, to be written to ``arena[position:position + nbytes]``.

    ``arena`` is a writable, C-contiguous memoryview of bytes that stays alive until ``done`` was called. With A the
    reader's ``alignment``, a piece lands in place, without a copy, if

    - ``(address(arena) + position) % A == offset % A``, and
    - the ``offset % A`` bytes before it, and the bytes behind it up to the next multiple of A, lie in the arena.

    Those surrounding bytes **may be overwritten** whenever they lie in the arena: nothing else may live in them,
    unless it is the file's own neighbouring bytes (so extents that touch in the file may touch in the arena). A piece
    that breaks the conditions is still read rightly, through a bounce buffer, which costs a copy.
    """

    file: int
    offset: int
    nbytes: int
    arena: memoryview
    position: int


class Reader(Protocol):
    """Asynchronous reads by a small pool of threads. Thread-safe."""

    name: str
    alignment: int
    """Bytes; a power of two, at least 4096. Place pieces with it."""

    def submit(self, pieces: Sequence[ReadPiece], done: Callable[[BaseException | None], None]) -> None:
        """Queue the pieces; ``done`` is called once, when all are in memory (None) or one has failed (a StorageError
        that names file and offset) and no thread writes to any of them any more. It is called from a reader thread,
        or from this call when there is nothing to read, and must not raise or block. Earlier submissions are served
        first."""
        ...

    def statistics(self) -> ReaderStatistics:
        """What has been read since the reader was opened."""
        ...

    def close(self) -> None:
        """Drop queued reads (their ``done`` gets a StorageError), end the threads, close the files. Idempotent."""
        ...


@dataclass(frozen=True, slots=True)
class ReaderStatistics:
    """Totals since the reader was opened, measured from its own events.

    ``bytes_asked``: sizes of the finished pieces. ``bytes_read``: what came from the files, over-reads included.
    ``reads``: read calls. ``busy_seconds``: time with at least one submission unfinished; the link idles for the rest.
    ``bounced_bytes``: bytes copied because a piece did not fit the contract of ReadPiece.
    ``buffered_files``: files read through the page cache because O_DIRECT is refused, and ``fallback_reason``: why.
    """

    submissions: int = 0
    bytes_asked: int = 0
    bytes_read: int = 0
    reads: int = 0
    busy_seconds: float = 0.0
    bounced_bytes: int = 0
    buffered_files: int = 0
    fallback_reason: str = ""

    @property
    def bytes_per_second(self) -> float:
        """Rate while busy; 0.0 before the first read."""
        return self.bytes_read / self.busy_seconds if self.busy_seconds > 0 else 0.0
