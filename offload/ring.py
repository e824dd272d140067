"""A ring of bytes in an arena or a piece of device memory: room for weights in flight, granted and given back in order.

Weights are consumed strictly in the order in which they are asked for, so the ring needs no slots of one size: a grant
is the next free stretch, and what is released from the tail becomes free at the head. The order is the contract. If
a later tile could take room before an earlier one, the earlier might wait for ever for what the later one holds, and
the later one is not consumed before the earlier: a deadlock. Releases may come out of order; the tail waits for gaps.
"""

from __future__ import annotations

from collections import deque
from typing import Generic, Protocol, TypeVar


class Memory(Protocol):
    """What a ring divides: an Arena, or memory of a device."""

    nbytes: int


M = TypeVar("M", bound=Memory)


class Grant:
    """A stretch of the ring, [start, start + nbytes)."""

    __slots__ = ("end", "nbytes", "released", "start")

    def __init__(self, start: int, nbytes: int, end: int) -> None:
        self.start = start
        self.nbytes = nbytes
        self.end = end  # in the endless coordinate that the head also runs in
        self.released = False


class Ring(Generic[M]):
    """Grants of contiguous bytes; each grant starts at a multiple of ``alignment``. Not thread-safe: one owner."""

    def __init__(self, arena: M, alignment: int) -> None:
        self.arena = arena
        self.alignment = alignment
        self.capacity = arena.nbytes // alignment * alignment
        self._head = 0  # endless coordinates: position in the arena = coordinate % capacity
        self._tail = 0
        self._grants: deque[Grant] = deque()
        self.peak = 0  # most bytes granted at once

    @property
    def used(self) -> int:
        """Bytes not available, skipped ends included."""
        return self._head - self._tail

    def grant(self, nbytes: int) -> Grant | None:
        """The next ``nbytes`` bytes, or None while too few are free. ValueError if the ring can never hold them."""
        size = -(-nbytes // self.alignment) * self.alignment
        if size > self.capacity:
            raise ValueError(f"{nbytes} bytes asked of a ring of {self.capacity}")
        if not self._grants:  # empty: no need to wrap around
            self._head = self._tail = 0
        start = self._head % self.capacity
        skipped = self.capacity - start if start + size > self.capacity else 0  # a grant does not wrap around
        end = self._head + skipped + size
        if end - self._tail > self.capacity:
            return None
        grant = Grant(0 if skipped else start, size, end)
        self._grants.append(grant)
        self._head = end
        self.peak = max(self.peak, self.used)
        return grant

    def release(self, grant: Grant) -> None:
        """Give a grant back; ValueError the second time."""
        if grant.released:
            raise ValueError("a grant was released twice")
        grant.released = True
        while self._grants and self._grants[0].released:
            self._tail = self._grants.popleft().end
