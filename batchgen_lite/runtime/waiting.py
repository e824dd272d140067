"""Rows that wait for admission, longest-lived first.

A row takes one sweep per token it generates, so the job cannot end before its longest row's tokens have been generated
one after the other: rows that may generate most start first. Among equals the longer prompt does, as it may need
several sweeps before its first token. A row's total length would mix the two up: prompt tokens cost compute, but no
sweeps of their own.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator

from batchgen_lite.runtime.interface import RequestSize, RequestSource


class WaitingQueue:
    """Indices of a source's rows in order of admission. 8 bytes a row, whatever the rows hold. ``prompt_tokens`` and
    ``new_tokens``: totals of the rows that still wait, the latter at most."""

    def __init__(self, source: RequestSource) -> None:
        self._source = source
        new = array("q", (source.size(index).max_tokens for index in range(len(source))))
        prompt = array("q", (source.size(index).prompt_tokens for index in range(len(source))))
        # Stable: rows of equal lengths keep the input's order.
        self._order = array("q", sorted(range(len(source)), key=lambda index: (-new[index], -prompt[index])))
        self._head = 0
        self.prompt_tokens = sum(prompt)
        self.new_tokens = sum(new)

    def __len__(self) -> int:
        return len(self._order) - self._head

    def __iter__(self) -> Iterator[tuple[int, RequestSize]]:
        """(index, size) from the head on; the queue stays as it is."""
        for at in range(self._head, len(self._order)):
            index = self._order[at]
            yield index, self._source.size(index)

    def drop(self, count: int) -> None:
        """The first ``count`` rows have left the queue."""
        for index in self._order[self._head : self._head + count]:
            size = self._source.size(index)
            self.prompt_tokens -= size.prompt_tokens
            self.new_tokens -= size.max_tokens
        self._head += count
