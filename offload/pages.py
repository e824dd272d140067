"""Page bookkeeping of the KV cache: who holds which page, without any tensor.

A page stands for 64 consecutive positions of one sequence in every layer. Pages are reference-counted, so that forked
sequences and shared prefixes can hold the same page; a shared page is copied before it is written to.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

PAGE_TOKENS = 64


def pages_for(tokens: int) -> int:
    """Pages that hold ``tokens`` positions. Admission, reservation and allocation all use this one formula."""
    return -(-tokens // PAGE_TOKENS)


class OutOfPages(Exception):
    """No page is free. The scheduler counts pages before it plans, so outside of tests this means a bug."""


class PageAllocator:
    """A free list over pages 0 .. capacity - 1. Freed pages are reused first: their memory is warm."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._references = [0] * capacity
        self._free = list(range(capacity - 1, -1, -1))

    @property
    def free(self) -> int:
        """Number of pages that nobody holds."""
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """``count`` pages, each with one reference; all or none (OutOfPages)."""
        if count > len(self._free):
            raise OutOfPages(f"{count} pages wanted, {len(self._free)} of {self.capacity} free")
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._references[page] = 1
        return pages

    def share(self, page: int) -> None:
        """One more reference to a held page."""
        if self._references[page] < 1:
            raise ValueError(f"page {page} is free and cannot be shared")
        self._references[page] += 1

    def release(self, page: int) -> None:
        """One reference less; the last one frees the page."""
        if self._references[page] < 1:
            raise ValueError(f"page {page} is free already")
        self._references[page] -= 1
        if self._references[page] == 0:
            self._free.append(page)

    def references(self, page: int) -> int:
        return self._references[page]

    def shrink(self, capacity: int) -> dict[int, int]:
        """Keep only pages 0 .. capacity - 1. Held pages beyond move to free ones below: returns old -> new, by which
        contents have to be copied and every table renumbered. OutOfPages, changing nothing, if too many are held."""
        beyond = [page for page in range(capacity, self.capacity) if self._references[page]]
        free = sorted(page for page in self._free if page < capacity)
        if not 0 <= capacity <= self.capacity or len(beyond) > len(free):
            held = self.capacity - self.free
            raise OutOfPages(f"{held} of {self.capacity} pages are held, {capacity} are to be kept")
        moves = dict(zip(beyond, free, strict=False))
        for old, new in moves.items():
            self._references[new] = self._references[old]
        del self._references[capacity:]
        self._free = free[len(beyond) :][::-1]
        self.capacity = capacity
        return moves

    def grow(self, capacity: int) -> None:
        """Have pages 0 .. capacity - 1 again; the new ones are free, and used last."""
        added = range(self.capacity, capacity)
        self._references += [0] * len(added)
        self._free[:0] = reversed(added)
        self.capacity = max(self.capacity, capacity)


@dataclass(slots=True)
class BlockTable:
    """One sequence's pages in order of position. ``length`` positions are committed; what lies beyond is garbage.

    The life of a span: ``reserve`` room, the sweep writes KV behind ``length``, ``commit`` moves ``length`` forward.
    A sweep that is aborted simply never commits.
    """

    allocator: PageAllocator
    pages: list[int] = field(default_factory=list)
    length: int = 0

    @property
    def capacity(self) -> int:
        """Positions that the held pages have room for."""
        return len(self.pages) * PAGE_TOKENS

    def pages_missing(self, tokens: int) -> int:
        """Pages that ``reserve(tokens)`` would take from the allocator, copies of shared pages not counted."""
        return max(0, pages_for(tokens) - len(self.pages))

    def reserve(self, tokens: int) -> list[tuple[int, int]]:
        """Hold pages for ``tokens`` positions in all, writable from ``length`` on.

        Returns (source, destination) pairs of shared pages that had to be replaced by own copies; their contents
        have to be copied before the next write. Takes all it needs or raises OutOfPages and changes nothing.
        """
        first_written = self.length // PAGE_TOKENS
        last = first_written + 1 == len(self.pages) and self.allocator.references(self.pages[first_written]) == 1
        if last and tokens <= self.capacity:  # the many that decode: only their last page matters
            return []
        shared = [i for i in range(first_written, len(self.pages)) if self.allocator.references(self.pages[i]) > 1]
        missing = self.pages_missing(tokens)
        if not missing and not shared:
            return []
        fresh = self.allocator.allocate(missing + len(shared))
        copies = []
        for i in shared:
            replacement = fresh.pop()
            copies.append((self.pages[i], replacement))
            self.allocator.release(self.pages[i])
            self.pages[i] = replacement
        self.pages.extend(fresh)
        return copies

    def commit(self, tokens: int) -> None:
        """The next ``tokens`` positions have been written in every layer."""
        if self.length + tokens > self.capacity:
            raise ValueError(f"{tokens} positions behind {self.length} exceed the {self.capacity} reserved")
        self.length += tokens

    def truncate(self, length: int) -> None:
        """Forget positions from ``length`` on and release the pages that hold none before it."""
        if length > self.length:
            raise ValueError(f"cannot truncate {self.length} positions to {length}")
        self.length = length
        keep = pages_for(length)
        for page in self.pages[keep:]:
            self.allocator.release(page)
        del self.pages[keep:]

    def renumber(self, moves: Mapping[int, int]) -> None:
        """Pages have moved, old -> new (PageAllocator.shrink)."""
        self.pages[:] = [moves.get(page, page) for page in self.pages]

    def fork(self) -> BlockTable:
        """A second table over the same committed positions; both stay valid and independent."""
        kept = self.pages[: pages_for(self.length)]
        for page in kept:
            self.allocator.share(page)
        return BlockTable(self.allocator, list(kept), self.length)
