"""The journal: tokens of running rows, and where each finished record lies. A kill costs at most one sweep.

Why an append-only file with checksums rather than SQLite. All we do is append, and read once at resume; a log does
that with one ``write`` a sweep, where a database writes every page twice (WAL, then checkpoint). A torn tail is found
by one rule, which a test checks at every byte length. WAL needs shared memory, so it does not work on network file
systems. And the order that matters, record against entry, spans two files, which no database would settle for us.

Order of writes, and what a power loss may do. A row's end is two writes: its line to OUT.partial, then a DONE entry
here, with the line's place and checksum. ``fsync`` takes them in the same order. Without one the kernel may bring them
to disk in any order, so at resume a DONE entry counts only if the bytes it names have its checksum. If it does not
count, the row is generated again, from its tokens here as far as they reached the disk. Tokens need no such care: an
entry depends on nothing but the tokens before it, and a log has no holes: reading stops at the first damaged frame.
Whatever is lost is made again with the same bytes, because a row's bits depend on nothing but itself.

Frame: kind u8, payload length u32, CRC-32 of both and of the payload u32, payload; all little-endian.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from batchgen_lite.errors import StorageError
from batchgen_lite.jobs.append_file import AppendFile
from batchgen_lite.jobs.done_table import DoneRow, DoneTable
from batchgen_lite.jobs.journal_format import (
    DONE,
    DONE_ENTRY,
    FORGET,
    MAGIC,
    PAIR,
    ROW,
    SCORED,
    TOKENS,
    Contents,
    LiveRow,
    frame,
    pack_scored,
)
from batchgen_lite.runtime.interface import SampledToken

_COMPACT_ABOVE = 32 << 20
_MAX_FRAME = 1 << 20


class Journal:
    """Open for one run. ``live`` and ``done`` always say what the file says, once ``flush`` has returned."""

    def __init__(
        self, path: Path, holds: Callable[[DoneRow], bool] = lambda entry: True, *, compact_above: int = _COMPACT_ABOVE
    ) -> None:
        """Read what an earlier run left, drop a torn tail, and be ready to append. ``holds``: see ``Contents``.
        StorageError if the file cannot be read or written, or is no journal."""
        self.path = path
        self._contents = Contents(holds)
        self._compact_above = compact_above
        self._pairs = bytearray()
        self._frames = bytearray()
        valid = self._contents.replay(read_journal(path))
        self._file = AppendFile(path, valid)
        if valid == 0:
            self._file.append(MAGIC)
        self._baseline = self._file.size

    @property
    def live(self) -> dict[int, LiveRow]:
        return self._contents.live

    @property
    def done(self) -> DoneTable:
        return self._contents.done

    def token(self, row: int, sampled: SampledToken, *, scored: bool) -> None:
        """Note one generated token; in the file after the next ``flush``."""
        if scored:
            self._end_pairs()
            self._frames += frame(SCORED, pack_scored(row, sampled))
        else:
            self._pairs += PAIR.pack(row, sampled.token)
            if len(self._pairs) >= _MAX_FRAME:
                self._end_pairs()
        self._contents.note(row, sampled, scored)

    def finished(self, row: int, entry: DoneRow) -> None:
        """Note that the row's record is in OUT.partial. Its line must have been written before."""
        self._end_pairs()
        self._frames += frame(DONE, DONE_ENTRY.pack(row, entry.status, entry.offset, entry.length, entry.crc))
        self._contents.finish(row, entry)

    def forget(self, row: int) -> None:
        """The row starts again from nothing."""
        self._end_pairs()
        self._frames += frame(FORGET, ROW.pack(row))
        self._contents.forget(row)

    def flush(self) -> None:
        """Hand everything noted to the kernel: from here on it survives a kill. StorageError if it cannot."""
        self._end_pairs()
        if self._frames:
            self._file.append(bytes(self._frames))
            self._frames.clear()
        if self._file.size - self._baseline > self._compact_above:
            self._compact()

    def sync(self) -> None:
        """From here on it survives a power loss. Callable from another thread."""
        self._file.sync()

    def close(self) -> None:
        self._file.close()

    def _end_pairs(self) -> None:
        if self._pairs:
            self._frames += frame(TOKENS, bytes(self._pairs))
            self._pairs.clear()

    def _compact(self) -> None:
        """Leave the tokens of finished rows behind: the file stays near the size of what is live."""
        fresh = self.path.with_name(self.path.name + ".new")
        file = AppendFile(fresh, 0)
        file.append(MAGIC)
        for piece in self._contents.frames(_MAX_FRAME):
            file.append(piece)
        file.sync()
        os.replace(fresh, self.path)
        self._file.replace_with(file)
        self._baseline = self._file.size


def read_journal(path: Path) -> bytes:
    """The file's bytes; empty if there is none. StorageError if it cannot be read or is something else."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return b""
    except OSError as error:
        raise StorageError(f"cannot read {path}: {error.strerror}") from error
    if len(data) >= len(MAGIC) and not data.startswith(MAGIC):
        raise StorageError(f"{path} is not a journal of this version; start the job again with --overwrite")
    return data
