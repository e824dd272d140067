"""Where finished records lie, row by row: 21 bytes a row, however many there are."""

from __future__ import annotations

import enum
import struct
from array import array
from collections.abc import Iterator
from dataclasses import dataclass


class Status(enum.IntEnum):
    """How a row ended; values are written to the journal."""

    STOPPED = 0
    FAILED = 1
    CUT = 2  # by max_tokens or the model's context: finish_reason "length"


@dataclass(frozen=True, slots=True)
class DoneRow:
    """A finished row's line in OUT.partial: byte offset, length with line end, CRC-32, and how the row ended."""

    offset: int
    length: int
    crc: int
    status: Status


class DoneTable:
    """Row -> DoneRow. A length of 0 marks a row that is not done (a record line never is empty)."""

    def __init__(self) -> None:
        self._offset = array("Q")
        self._length = array("I")
        self._crc = array("I")
        self._status = bytearray()
        self._counts = [0] * len(Status)

    def __len__(self) -> int:
        return sum(self._counts)

    def number(self, status: Status) -> int:
        """How many rows ended that way."""
        return self._counts[status]

    def __contains__(self, row: object) -> bool:
        return isinstance(row, int) and row < len(self._length) and self._length[row] > 0

    def get(self, row: int) -> DoneRow | None:
        if row not in self:
            return None
        return DoneRow(self._offset[row], self._length[row], self._crc[row], Status(self._status[row]))

    def set(self, row: int, entry: DoneRow) -> None:
        self.clear(row)
        missing = row + 1 - len(self._length)
        if missing > 0:
            missing = max(missing, len(self._length) // 2)  # doubling-like growth: appending stays linear
            self._offset.frombytes(bytes(8 * missing))
            self._length.frombytes(bytes(4 * missing))
            self._crc.frombytes(bytes(4 * missing))
            self._status.extend(bytes(missing))
        self._offset[row], self._length[row] = entry.offset, entry.length
        self._crc[row], self._status[row] = entry.crc, entry.status
        self._counts[entry.status] += 1

    def clear(self, row: int) -> None:
        if row in self:
            self._counts[self._status[row]] -= 1
            self._length[row] = 0

    def rows(self) -> Iterator[tuple[int, DoneRow]]:
        """Every finished row, in row order."""
        for row in range(len(self._length)):
            entry = self.get(row)
            if entry is not None:
                yield row, entry

    def packed(self, entry: struct.Struct, limit: int) -> Iterator[bytes]:
        """All rows as journal entries, in payloads of about ``limit`` bytes."""
        payload = bytearray()
        for row, done in self.rows():
            payload += entry.pack(row, done.status, done.offset, done.length, done.crc)
            if len(payload) >= limit:
                yield bytes(payload)
                payload.clear()
        if payload:
            yield bytes(payload)
