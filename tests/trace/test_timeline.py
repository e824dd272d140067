from __future__ import annotations

import random

import pytest

from batchgen_lite.trace.timeline import INTERVALS, Timeline


def test_an_amount_is_spread_evenly_over_its_time() -> None:
    line = Timeline(("read",), (), first_seconds=1.0)
    line.add("read", 0.5, 3.0, 250.0)
    assert line.flow("read") == pytest.approx([50.0, 100.0, 100.0, 0.0])


def test_an_instant_lands_in_one_interval() -> None:
    line = Timeline(("read",), (), first_seconds=1.0)
    line.add("read", 2.5, 2.5, 7.0)
    assert line.flow("read") == [0.0, 0.0, 7.0]


def test_nothing_is_lost_as_the_run_outgrows_the_intervals() -> None:
    rng = random.Random(3)
    line = Timeline(("read",), ("batch",), first_seconds=0.01)
    total, now = 0.0, 0.0
    for _ in range(20_000):
        seconds, amount = rng.uniform(0, 5), rng.uniform(0, 10)
        line.add("read", now, now + seconds, amount)
        total, now = total + amount, now + seconds
        line.sample("batch", now, 3.0)
    assert line.total("read") == pytest.approx(total)
    assert line.width * INTERVALS > now
    assert line.width * INTERVALS <= 2 * now + 1
    assert len(line.flow("read")) <= INTERVALS
    assert set(line.level("batch")[1:]) == {3.0}


def test_levels_hold_until_the_next_sample() -> None:
    line = Timeline(("read",), ("rows",), first_seconds=1.0)
    line.sample("rows", 0.2, 4.0)
    line.sample("rows", 0.4, 8.0)
    line.add("read", 3.0, 3.5, 1.0)
    assert line.level("rows") == [6.0, 6.0, 6.0, 6.0]
    assert line.peaks("rows") == [8.0, 6.0, 6.0, 6.0]


def test_peaks_survive_the_merging_of_intervals() -> None:
    line = Timeline((), ("memory",), first_seconds=1.0)
    line.sample("memory", 5.0, 100.0)
    line.sample("memory", 6.0, 1.0)
    line.sample("memory", 10_000.0, 2.0)
    assert max(line.peaks("memory")) == 100.0
