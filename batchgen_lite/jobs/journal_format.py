"""Frames of the journal, and what they add up to. The essay is in ``journal``."""

from __future__ import annotations

import struct
import zlib
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from batchgen_lite.jobs.done_table import DoneRow, DoneTable, Status
from batchgen_lite.runtime.interface import SampledToken

MAGIC = b"BGLJRNL1"

TOKENS, SCORED, DONE, FORGET = 1, 2, 3, 4

PAIR = struct.Struct("<II")  # row, token
ROW = struct.Struct("<I")
DONE_ENTRY = struct.Struct("<IBQII")  # row, status, offset, length, CRC-32 of the record's line

_FRAME = struct.Struct("<BII")
_SCORED_HEAD = struct.Struct("<IIdH")  # row, token, logprob, number of candidates
_CANDIDATE = struct.Struct("<Id")


@dataclass(slots=True)
class LiveRow:
    """Tokens of a row that is not finished; ``scored`` runs beside ``tokens`` if the row asks for logprobs."""

    tokens: array[int] = field(default_factory=lambda: array("I"))
    scored: list[SampledToken] = field(default_factory=list)

    def sampled(self) -> list[SampledToken]:
        return list(self.scored) or [SampledToken(token) for token in self.tokens]


class Contents:
    """What a journal says: tokens of ``live`` rows, places of ``done`` rows. ``holds`` says whether a record really is
    where its entry says; if not, the entry does not count and the row keeps its tokens."""

    def __init__(self, holds: Callable[[DoneRow], bool]) -> None:
        self.live: dict[int, LiveRow] = {}
        self.done = DoneTable()
        self._holds = holds

    def replay(self, data: bytes) -> int:
        """Apply every sound frame of a journal file; returns where they end (0 if not even the head is sound)."""
        valid = len(MAGIC) if data.startswith(MAGIC) else 0
        for kind, payload, end in _frames(data, valid):
            self._apply(kind, payload)
            valid = end
        return valid

    def note(self, row: int, sampled: SampledToken, scored: bool) -> None:
        live = self.live.get(row)
        if live is None:
            live = self.live[row] = LiveRow()
        live.tokens.append(sampled.token)
        if scored:
            live.scored.append(sampled)

    def finish(self, row: int, entry: DoneRow) -> None:
        self.done.set(row, entry)
        self.live.pop(row, None)

    def forget(self, row: int) -> None:
        self.done.clear(row)
        self.live.pop(row, None)

    def frames(self, limit: int) -> Iterator[bytes]:
        """The shortest journal that says the same."""
        for payload in self.done.packed(DONE_ENTRY, limit):
            yield frame(DONE, payload)
        for row, live in self.live.items():
            if live.scored:
                yield b"".join(frame(SCORED, pack_scored(row, sampled)) for sampled in live.scored)
            else:
                yield frame(TOKENS, b"".join(PAIR.pack(row, token) for token in live.tokens))

    def _apply(self, kind: int, payload: bytes) -> None:
        if kind == TOKENS:
            for row, token in PAIR.iter_unpack(payload):
                self.note(row, SampledToken(token), False)
        elif kind == SCORED:
            row, sampled = _unpack_scored(payload)
            self.note(row, sampled, True)
        elif kind == DONE:
            for row, status, offset, length, crc in DONE_ENTRY.iter_unpack(payload):
                entry = DoneRow(offset, length, crc, Status(status))
                if self._holds(entry):
                    self.finish(row, entry)
        elif kind == FORGET:
            self.forget(ROW.unpack(payload)[0])


def frame(kind: int, payload: bytes) -> bytes:
    crc = zlib.crc32(payload, zlib.crc32(struct.pack("<BI", kind, len(payload))))
    return _FRAME.pack(kind, len(payload), crc) + payload


def pack_scored(row: int, sampled: SampledToken) -> bytes:
    logprob = sampled.logprob if sampled.logprob is not None else 0.0
    head = _SCORED_HEAD.pack(row, sampled.token, logprob, len(sampled.top_logprobs))
    return head + b"".join(_CANDIDATE.pack(token, value) for token, value in sampled.top_logprobs)


def _unpack_scored(payload: bytes) -> tuple[int, SampledToken]:
    row, token, logprob, count = _SCORED_HEAD.unpack_from(payload)
    top = [_CANDIDATE.unpack_from(payload, _SCORED_HEAD.size + i * _CANDIDATE.size) for i in range(count)]
    return row, SampledToken(token, logprob, tuple((ident, value) for ident, value in top))


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
