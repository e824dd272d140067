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
import struct
import zlib
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from batchgen_lite.errors import StorageError
from batchgen_lite.jobs.append_file import AppendFile
from batchgen_lite.jobs.done_table import DoneRow, DoneTable, Status
from batchgen_lite.runtime.interface import SampledToken

MAGIC = b"BGLJRNL1"

_FRAME = struct.Struct("<BII")
_TOKENS, _SCORED, _DONE, _FORGET = 1, 2, 3, 4
_PAIR = struct.Struct("<II")
_DONE_ENTRY = struct.Struct("<IBQII")
_SCORED_HEAD = struct.Struct("<IIdH")
_CANDIDATE = struct.Struct("<Id")

_COMPACT_ABOVE = 32 << 20
_MAX_FRAME = 1 << 20


@dataclass(slots=True)
class LiveRow:
    """Tokens of a row that is not finished; ``scored`` runs beside ``tokens`` if the row asks for logprobs."""

    tokens: array[int] = field(default_factory=lambda: array("I"))
    scored: list[SampledToken] = field(default_factory=list)

    def sampled(self) -> list[SampledToken]:
        return self.scored or [SampledToken(token) for token in self.tokens]


class Journal:
    """Open for one run. ``live`` and ``done`` always say what the file says, once ``flush`` has returned."""

    def __init__(
        self, path: Path, holds: Callable[[DoneRow], bool] = lambda entry: True, *, compact_above: int = _COMPACT_ABOVE
    ) -> None:
        """Read what an earlier run left, drop a torn tail, and be ready to append. ``holds`` says whether a record
        really is where its entry says; if not, the row is not done and keeps its tokens. StorageError on failure."""
        self.live: dict[int, LiveRow] = {}
        self.done = DoneTable()
        self.path = path
        self._holds = holds
        self._compact_above = compact_above
        self._pairs = bytearray()
        self._frames = bytearray()
        data = _read(path)
        valid = len(MAGIC) if data.startswith(MAGIC) else 0
        if data and not valid and len(data) >= len(MAGIC):
            raise StorageError(f"{path} is not a journal of this version; --overwrite starts the job again")
        for kind, payload, end in _frames(data, valid):
            self._apply(kind, payload)
            valid = end
        self._file = AppendFile(path, valid)
        if valid == 0:
            self._file.append(MAGIC)
        self._baseline = self._file.size

    def token(self, row: int, sampled: SampledToken, *, scored: bool) -> None:
        """Note one generated token; in the file after the next ``flush``."""
        if scored:
            self._end_pairs()
            self._add(_SCORED, _pack_scored(row, sampled))
        else:
            self._pairs += _PAIR.pack(row, sampled.token)
            if len(self._pairs) >= _MAX_FRAME:
                self._end_pairs()
        self._note(row, sampled, scored)

    def finished(self, row: int, entry: DoneRow) -> None:
        """Note that the row's record is in OUT.partial. Its line must have been written before."""
        self._end_pairs()
        self._add(_DONE, _DONE_ENTRY.pack(row, entry.status, entry.offset, entry.length, entry.crc))
        self.done.set(row, entry)
        self.live.pop(row, None)

    def forget(self, row: int) -> None:
        """The row starts again from nothing."""
        self._end_pairs()
        self._add(_FORGET, struct.pack("<I", row))
        self.done.clear(row)
        self.live.pop(row, None)

    def flush(self) -> None:
        """Hand everything noted to the kernel: from here on it survives a kill. StorageError if it cannot."""
        self._end_pairs()
        if self._frames:
            self._file.append(bytes(self._frames))
            self._frames.clear()
        if self._file.size - self._baseline > self._compact_above:
            self._compact()

    @property
    def pending(self) -> bool:
        return bool(self._pairs or self._frames)

    def sync(self) -> None:
        """From here on it survives a power loss. Callable from another thread."""
        self._file.sync()

    def close(self) -> None:
        self._file.close()

    def _apply(self, kind: int, payload: bytes) -> None:
        if kind == _TOKENS:
            for row, token in _PAIR.iter_unpack(payload):
                self._note(row, SampledToken(token), False)
        elif kind == _SCORED:
            row, sampled = _unpack_scored(payload)
            self._note(row, sampled, True)
        elif kind == _DONE:
            for row, status, offset, length, crc in _DONE_ENTRY.iter_unpack(payload):
                entry = DoneRow(offset, length, crc, Status(status))
                if self._holds(entry):
                    self.done.set(row, entry)
                    self.live.pop(row, None)
        elif kind == _FORGET:
            (row,) = struct.unpack("<I", payload)
            self.done.clear(row)
            self.live.pop(row, None)

    def _note(self, row: int, sampled: SampledToken, scored: bool) -> None:
        live = self.live.get(row)
        if live is None:
            live = self.live[row] = LiveRow()
        live.tokens.append(sampled.token)
        if scored:
            live.scored.append(sampled)

    def _end_pairs(self) -> None:
        if self._pairs:
            self._add(_TOKENS, bytes(self._pairs))
            self._pairs.clear()

    def _add(self, kind: int, payload: bytes) -> None:
        self._frames += _frame(kind, payload)

    def _compact(self) -> None:
        """Leave the tokens of finished rows behind: the file stays near the size of what is live."""
        fresh = self.path.with_name(self.path.name + ".new")
        fresh.unlink(missing_ok=True)
        file = AppendFile(fresh, 0)
        file.append(MAGIC)
        for payload in self.done.packed(_DONE_ENTRY, _MAX_FRAME):
            file.append(_frame(_DONE, payload))
        for row, live in self.live.items():
            if live.scored:
                file.append(b"".join(_frame(_SCORED, _pack_scored(row, sampled)) for sampled in live.scored))
            else:
                pairs = b"".join(_PAIR.pack(row, token) for token in live.tokens)
                file.append(_frame(_TOKENS, pairs))
        file.sync()
        os.replace(fresh, self.path)
        self._file.replace_with(file)
        self._baseline = self._file.size


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return b""
    except OSError as error:
        raise StorageError(f"cannot read {path}: {error.strerror}") from error


def _frame(kind: int, payload: bytes) -> bytes:
    crc = zlib.crc32(payload, zlib.crc32(struct.pack("<BI", kind, len(payload))))
    return _FRAME.pack(kind, len(payload), crc) + payload


def _frames(data: bytes, start: int) -> Iterator[tuple[int, bytes, int]]:
    """Kind, payload and end of each sound frame; stops at the first that is not."""
    while start and start + _FRAME.size <= len(data):
        kind, length, crc = _FRAME.unpack_from(data, start)
        body = start + _FRAME.size
        payload = data[body : body + length]
        if len(payload) != length or zlib.crc32(payload, zlib.crc32(struct.pack("<BI", kind, length))) != crc:
            return
        start = body + length
        yield kind, payload, start


def _pack_scored(row: int, sampled: SampledToken) -> bytes:
    logprob = sampled.logprob if sampled.logprob is not None else 0.0
    head = _SCORED_HEAD.pack(row, sampled.token, logprob, len(sampled.top_logprobs))
    return head + b"".join(_CANDIDATE.pack(token, value) for token, value in sampled.top_logprobs)


def _unpack_scored(payload: bytes) -> tuple[int, SampledToken]:
    row, token, logprob, count = _SCORED_HEAD.unpack_from(payload)
    top = [_CANDIDATE.unpack_from(payload, _SCORED_HEAD.size + i * _CANDIDATE.size) for i in range(count)]
    return row, SampledToken(token, logprob, tuple((ident, value) for ident, value in top))
