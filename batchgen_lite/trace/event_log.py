"""Events in bounded memory, whole sweeps at a time.

A night has millions of events, and neither its beginning nor its end alone says what it was like. So the log keeps
*all* events of *some* sweeps: every sweep at first; whenever the memory is full, every other one of those it has, and
from then on only as few of the new ones. What remains is spread evenly over the run, and each kept sweep can be read
from its first tile to its last. The newest sweep is always kept: it is the one in which a run was interrupted.

An event takes 32 bytes. Thread-safe.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum

LIMIT_BYTES = 8 << 20  # of all kept sweeps; the newest one may take half as much again
_EVENT = struct.Struct("<dfBBhiiq")
_PER_SWEEP = 160  # bytes that Python takes to keep a sweep's events, beside the events


class What(IntEnum):
    """What an event is about; each is a lane of the trace."""

    READ = 0  # a submission to the reader: index = file, extra = nothing
    COPY_IN = 1
    COPY_OUT = 2
    WAIT = 3
    MODULE = 4
    ATTENTION = 5
    TILE = 6  # index = expert
    KV = 7  # index = row
    SWEEP = 8  # index = sequences
    BETWEEN = 9  # two sweeps: scheduling, text, journal


@dataclass(frozen=True, slots=True)
class Event:
    """Times in seconds of the recorder's clock. ``name``: a module's kind or an action. What does not apply is 0."""

    what: What
    start: float
    seconds: float
    name: str
    layer: int
    index: int
    tokens: int
    nbytes: int


class EventLog:
    """``add`` from any thread; ``new_sweep`` between two sweeps; ``events`` at the end."""

    def __init__(self, limit_bytes: int = LIMIT_BYTES) -> None:
        self._limit = limit_bytes
        self._lock = threading.Lock()
        self._names: dict[str, int] = {}
        self._kept: list[tuple[int, bytes]] = []  # (sweep, its events), the newest sweep left out
        self._kept_bytes = 0
        self._newest = bytearray()
        self._sweep = 0
        self.stride = 1
        """Every so manieth sweep is kept."""
        self.dropped = 0
        """Events of single sweeps that alone exceed the memory."""

    def add(
        self, what: What, start: float, seconds: float, name: str, layer: int, index: int, tokens: int, nbytes: int
    ) -> None:
        with self._lock:
            code = self._names.get(name)
            if code is None:
                code = self._names[name] = min(len(self._names), 255)
            if len(self._newest) >= self._limit // 2:
                self.dropped += 1
                return
            self._newest += _EVENT.pack(start, seconds, what, code, layer, index, tokens, nbytes)

    def new_sweep(self) -> None:
        """What comes from now on belongs to the next sweep."""
        with self._lock:
            if self._sweep % self.stride == 0:
                self._kept.append((self._sweep, bytes(self._newest)))
                self._kept_bytes += len(self._newest) + _PER_SWEEP
                while self._kept_bytes > self._limit:
                    self._thin()
            self._newest = bytearray()
            self._sweep += 1

    def _thin(self) -> None:
        self.stride *= 2
        self._kept = [(sweep, events) for sweep, events in self._kept if sweep % self.stride == 0]
        self._kept_bytes = sum(len(events) + _PER_SWEEP for _, events in self._kept)

    @property
    def nbytes(self) -> int:
        """Bytes that the log holds now."""
        with self._lock:
            return self._kept_bytes + len(self._newest)

    @property
    def kept_sweeps(self) -> list[int]:
        """Numbers of the sweeps whose events are there; 0 also holds what came before the first sweep."""
        with self._lock:
            return [sweep for sweep, _ in self._kept] + [self._sweep]

    def events(self) -> Iterator[Event]:
        """All kept events, sweep by sweep, within one in the order in which they ended."""
        with self._lock:
            parts = [events for _, events in self._kept] + [bytes(self._newest)]
            names = {code: name for name, code in self._names.items()}
        for part in parts:
            for start, seconds, what, code, layer, index, tokens, nbytes in _EVENT.iter_unpack(part):
                yield Event(What(what), start, seconds, names[code], layer, index, tokens, nbytes)
