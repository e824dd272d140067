"""The ring: contiguous grants in order, no overlap, no loss."""

from __future__ import annotations

import random

import pytest

from batchgen_lite.offload.arena import Arena
from batchgen_lite.offload.ring import Grant, Ring


def ring_of(nbytes: int) -> Ring:
    return Ring(Arena(nbytes), 4096)


def test_grants_follow_each_other_and_wrap_around() -> None:
    ring = ring_of(5 * 4096)
    a, b = ring.grant(2 * 4096), ring.grant(2 * 4096)
    assert a is not None
    assert b is not None
    assert (a.start, b.start) == (0, 2 * 4096)
    assert ring.grant(2 * 4096) is None  # one block is left at the end, and the start is taken
    ring.release(a)
    c = ring.grant(2 * 4096)
    assert c is not None
    assert c.start == 0  # the last block is skipped: a grant does not wrap around
    ring.release(b)
    ring.release(c)
    assert ring.grant(5 * 4096) is not None  # empty again: all of it


def test_what_can_never_fit_is_an_error_not_a_wait() -> None:
    with pytest.raises(ValueError, match="asked of a ring of 8192"):
        ring_of(8192).grant(8193)


def test_releases_out_of_order_wait_for_the_tail() -> None:
    ring = ring_of(4 * 4096)
    grants = [ring.grant(4096) for _ in range(4)]
    assert ring.grant(1) is None
    ring.release(grants[1])  # type: ignore[arg-type]
    assert ring.grant(1) is None
    ring.release(grants[0])  # type: ignore[arg-type]
    again = ring.grant(2 * 4096)
    assert again is not None
    assert again.start == 0
    with pytest.raises(ValueError, match="twice"):
        ring.release(grants[0])  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(6))
def test_live_grants_never_overlap(seed: int) -> None:
    rng = random.Random(seed)
    ring = ring_of(64 * 4096)
    live: list[Grant] = []
    granted = 0
    for _ in range(2000):
        if live and rng.random() < 0.5:
            ring.release(live.pop(rng.randrange(min(3, len(live)))))
        grant = ring.grant(rng.randint(1, 16 * 4096))
        if grant is not None:
            for other in live:
                assert grant.start + grant.nbytes <= other.start or other.start + other.nbytes <= grant.start
            assert grant.start + grant.nbytes <= ring.capacity
            live.append(grant)
            granted += 1
    assert granted > 200
