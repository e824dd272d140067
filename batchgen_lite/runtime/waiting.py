"""Rows that wait for admission, longest expected first."""

from __future__ import annotations

from array import array
from collections.abc import Iterator

from batchgen_lite.runtime.interface import RequestSize, RequestSource


class WaitingQueue:
    """Indices of a source's rows in order of admission. 8 bytes a row, whatever the rows hold."""

    def __init__(self, source: RequestSource) -> None:
        self._source = source
        expected = array("q", (size.prompt_tokens + size.max_tokens for size in map(source.size, range(len(source)))))
        # Stable: rows of equal length keep the input's order.
        self._order = array("q", sorted(range(len(source)), key=lambda index: -expected[index]))
        self._head = 0

    def __len__(self) -> int:
        return len(self._order) - self._head

    def __iter__(self) -> Iterator[tuple[int, RequestSize]]:
        """(index, size) from the head on; the queue stays as it is."""
        for at in range(self._head, len(self._order)):
            index = self._order[at]
            yield index, self._source.size(index)

    def drop(self, count: int) -> None:
        """The first ``count`` rows have left the queue."""
        self._head += count
