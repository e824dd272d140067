"""Which value was last set for each byte of a range, as disjoint intervals."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator
from typing import Generic, TypeVar

V = TypeVar("V")


class Intervals(Generic[V]):
    """Values over half-open ranges of integers; setting replaces what was set there before."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._held: dict[int, tuple[int, V]] = {}  # start -> (stop, value)

    def set(self, start: int, stop: int, value: V) -> None:
        """Set ``value`` for [start, stop)."""
        self.clear(start, stop)
        if start < stop:
            self._put(start, stop, value)

    def clear(self, start: int, stop: int) -> None:
        """Forget [start, stop)."""
        for begin, end, value in list(self.over(start, stop)):
            del self._held[begin]
            del self._starts[bisect_left(self._starts, begin)]
            if begin < start:
                self._put(begin, start, value)
            if stop < end:
                self._put(stop, end, value)

    def over(self, start: int, stop: int) -> Iterator[tuple[int, int, V]]:
        """Intervals (start, stop, value) that share a point with [start, stop)."""
        if start >= stop:
            return
        at = max(0, bisect_right(self._starts, start) - 1)
        while at < len(self._starts) and self._starts[at] < stop:
            begin = self._starts[at]
            end, value = self._held[begin]
            if end > start:
                yield begin, end, value
            at += 1

    def _put(self, start: int, stop: int, value: V) -> None:
        insort(self._starts, start)
        self._held[start] = (stop, value)
