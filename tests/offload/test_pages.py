"""Page bookkeeping: reference counts, reservation, commit, truncate, fork with copy on write."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchgen_lite.offload.pages import PAGE_TOKENS, BlockTable, OutOfPages, PageAllocator, pages_for


def test_pages_for_rounds_up() -> None:
    assert [pages_for(n) for n in (0, 1, 63, 64, 65, 128, 129)] == [0, 1, 1, 1, 2, 2, 3]


def test_allocation_is_all_or_nothing() -> None:
    allocator = PageAllocator(3)
    allocator.allocate(2)
    with pytest.raises(OutOfPages, match="2 pages wanted, 1 of 3 free"):
        allocator.allocate(2)
    assert allocator.free == 1


def test_a_free_page_is_neither_released_nor_shared() -> None:
    allocator = PageAllocator(1)
    (page,) = allocator.allocate(1)
    allocator.release(page)
    with pytest.raises(ValueError, match="free already"):
        allocator.release(page)
    with pytest.raises(ValueError, match="cannot be shared"):
        allocator.share(page)


def test_reserve_commit_truncate() -> None:
    table = BlockTable(PageAllocator(4))
    assert table.reserve(100) == []
    assert (len(table.pages), table.capacity, table.length) == (2, 128, 0)
    table.commit(100)
    with pytest.raises(ValueError, match="exceed the 128 reserved"):
        table.commit(29)
    table.truncate(64)
    assert (len(table.pages), table.length, table.allocator.free) == (1, 64, 3)
    with pytest.raises(ValueError, match="cannot truncate"):
        table.truncate(65)


def test_truncate_gives_back_what_was_only_reserved() -> None:
    table = BlockTable(PageAllocator(4))
    table.reserve(200)
    table.commit(10)
    table.truncate(10)
    assert table.allocator.free == 3


def test_fork_shares_pages_until_one_side_writes() -> None:
    allocator = PageAllocator(5)
    table = BlockTable(allocator)
    table.reserve(100)
    table.commit(100)
    other = table.fork()
    assert other.pages == table.pages
    assert allocator.free == 3
    copies = other.reserve(101)  # the half-filled second page has to become its own
    assert copies == [(table.pages[1], other.pages[1])]
    assert other.pages[0] == table.pages[0]
    assert table.reserve(101) == []  # now nobody shares it any more
    table.truncate(0)
    assert allocator.references(other.pages[0]) == 1
    other.truncate(0)
    assert allocator.free == 5


def test_a_full_shared_page_is_never_copied() -> None:
    table = BlockTable(PageAllocator(4))
    table.reserve(64)
    table.commit(64)
    other = table.fork()
    assert other.reserve(65) == []
    assert other.pages[0] == table.pages[0]


@given(st.lists(st.tuples(st.sampled_from("rctfd"), st.integers(0, 5), st.integers(0, 300)), max_size=60))
def test_any_history_keeps_every_reference_accounted_for(history: list[tuple[str, int, int]]) -> None:
    allocator = PageAllocator(12)
    tables = [BlockTable(allocator)]
    for action, which, amount in history:
        table = tables[which % len(tables)]
        if action == "r":
            before = (list(table.pages), allocator.free)
            try:
                table.reserve(amount)
            except OutOfPages:
                assert (table.pages, allocator.free) == before
        elif action == "c":
            table.commit(min(amount, table.capacity - table.length))
        elif action == "t":
            table.truncate(min(amount, table.length))
        elif action == "f" and len(tables) < 5:
            tables.append(table.fork())
        elif action == "d":
            table.truncate(0)
        for page in range(allocator.capacity):
            assert allocator.references(page) == sum(t.pages.count(page) for t in tables)
        for t in tables:
            assert pages_for(t.length) <= len(t.pages)
            assert t.capacity == len(t.pages) * PAGE_TOKENS
    held = {page for t in tables for page in t.pages}
    assert allocator.free == allocator.capacity - len(held)


def test_shrinking_moves_held_pages_to_free_ones_below() -> None:
    allocator = PageAllocator(8)
    first, second = BlockTable(allocator), BlockTable(allocator)
    first.reserve(3 * PAGE_TOKENS)  # pages 0 to 2
    second.reserve(4 * PAGE_TOKENS)  # pages 3 to 6
    second.commit(2 * PAGE_TOKENS)
    shared = second.fork()
    first.truncate(0)
    with pytest.raises(OutOfPages, match="4 of 8 pages are held, 3 are to be kept"):
        allocator.shrink(3)
    moves = allocator.shrink(5)
    assert moves == {5: 0, 6: 1}
    for table in (second, shared):
        table.renumber(moves)
    assert (second.pages, shared.pages) == ([3, 4, 0, 1], [3, 4])
    assert [allocator.references(page) for page in range(5)] == [1, 1, 0, 2, 2]
    assert (allocator.capacity, allocator.free) == (5, 1)
    assert allocator.allocate(1) == [2]
    allocator.grow(8)
    assert sorted(allocator.allocate(3)) == [5, 6, 7]


@given(st.lists(st.integers(1, 200), max_size=8), st.lists(st.integers(0, 7)), st.integers(0, 30))
def test_any_shrinking_keeps_every_reference_accounted_for(lengths: list[int], ended: list[int], keep: int) -> None:
    allocator = PageAllocator(30)
    tables = []
    for length in lengths:
        tables.append(BlockTable(allocator))
        tables[-1].reserve(length)
    for which in ended:
        if which < len(tables):
            tables[which].truncate(0)
    held = {page: table for table in tables for page in table.pages}
    if keep < len(held):
        with pytest.raises(OutOfPages):
            allocator.shrink(keep)
        return
    moves = allocator.shrink(keep)
    for table in tables:
        table.renumber(moves)
    now = {page: table for table in tables for page in table.pages}
    assert now == {moves.get(page, page): table for page, table in held.items()}
    assert len(now) == len(held)
    assert all(page < keep for page in now)
    rest = allocator.allocate(keep - len(held))
    assert sorted([*rest, *now]) == list(range(keep))
