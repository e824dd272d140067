"""The state machine, and positions instead of phases."""

from __future__ import annotations

from itertools import product

import pytest

from batchgen_lite.offload.pages import PageAllocator
from batchgen_lite.runtime.primitives import migrate, partition
from batchgen_lite.runtime.sequence import IllegalMove, Sequence, State

ALLOWED = {
    ("queued", "running"),
    ("queued", "failed"),
    ("running", "held"),
    ("running", "evicted"),
    ("running", "done"),
    ("running", "failed"),
    ("held", "running"),
    ("held", "evicted"),
    ("held", "failed"),
    ("evicted", "running"),
    ("evicted", "failed"),
}


def sequence(length: int = 100, pages: int = 8) -> Sequence:
    return Sequence(3, range(length), 20, PageAllocator(pages))


@pytest.mark.parametrize(("before", "after"), list(product(State, State)), ids=lambda state: state.value)
def test_only_the_moves_of_the_state_machine_are_possible(before: State, after: State) -> None:
    moving = sequence()
    moving.state = before
    if (before.value, after.value) in ALLOWED:
        moving.move(after)
        assert moving.state is after
    else:
        with pytest.raises(IllegalMove, match=f"sequence 3: {before.value} -> {after.value}"):
            moving.move(after)


def test_pending_is_what_is_known_but_not_computed() -> None:
    one = sequence(100)
    assert (one.pending, one.num_computed, one.remaining) == (100, 0, 20)
    one.table.reserve(128)
    one.table.commit(100)
    assert one.pending == 0
    one.append(7)
    assert (one.pending, one.remaining) == (1, 19)


def test_migrate_keeps_the_tokens_and_nothing_else() -> None:
    one = sequence(100)
    one.move(State.RUNNING)
    one.table.reserve(128)
    one.table.commit(100)
    one.append(7)
    migrate(one)
    assert one.state is State.EVICTED
    assert (one.table.pages, one.table.allocator.free) == ([], 8)
    assert (one.pending, one.num_computed) == (101, 0)
    one.check()


def test_partition_cuts_pending_work_to_any_size() -> None:
    one = sequence(100)
    one.table.reserve(128)
    parts = []
    while one.pending:
        start, count = partition(one, 33)
        parts.append((start, count))
        one.table.commit(count)
    assert parts == [(0, 33), (33, 33), (66, 33), (99, 1)]


def test_check_finds_a_span_that_has_no_pages() -> None:
    one = sequence(100)
    one.move(State.RUNNING)
    one.table.reserve(64)
    one.check(64)
    with pytest.raises(AssertionError):
        one.check(65)
    one.state = State.EVICTED
    with pytest.raises(AssertionError):
        one.check()
