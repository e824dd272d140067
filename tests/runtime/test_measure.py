"""The summary's shares, from sweeps whose times are known."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence

import pytest

from batchgen_lite.offload.pages import PageAllocator
from batchgen_lite.offload.readers.protocol import ReaderStatistics
from batchgen_lite.runtime.clock import VirtualClock
from batchgen_lite.runtime.interface import SampledToken
from batchgen_lite.runtime.measure import MeasuringRunner, Shares
from batchgen_lite.runtime.scheduler import Limits
from batchgen_lite.runtime.work import PageChanges, SweepAborted, Work


class Scripted:
    """A runner whose sweeps take what a script says: (seconds, waited, link busy, bytes)."""

    def __init__(self, clock: VirtualClock, script: Sequence[tuple[float, float, float, int]]) -> None:
        self.allocator = PageAllocator(4)
        self.clock, self.script = clock, list(script)
        self.waited, self.busy, self.nbytes = 0.0, 0.0, 0

    def limits(self) -> Limits:
        return Limits(1, 1, 4)

    async def run(self, work: Sequence[Work], changes: PageChanges) -> list[SampledToken | None]:
        seconds, waited, busy, nbytes = self.script.pop(0)
        self.clock.advance(seconds)
        self.waited += waited
        self.read(busy, nbytes)
        if seconds < 0.5:
            raise SweepAborted
        return []

    def read(self, busy: float, nbytes: int) -> None:
        self.busy += busy
        self.nbytes += nbytes

    def statistics(self) -> ReaderStatistics:
        return ReaderStatistics(bytes_read=self.nbytes, busy_seconds=self.busy)

    def abort(self) -> None:
        raise AssertionError


def measured(script: Sequence[tuple[float, float, float, int]], between: float, read_between: float = 0.0) -> Shares:
    clock = VirtualClock()
    runner = Scripted(clock, script)
    measuring = MeasuringRunner(runner, clock, runner.statistics, lambda: runner.waited)

    async def sweeps() -> None:
        for _ in range(len(script)):
            with contextlib.suppress(SweepAborted):
                await measuring.run([], PageChanges([], []))
            clock.advance(between)
            runner.read(read_between, 0)

    asyncio.run(sweeps())
    return measuring.shares


def test_an_io_bound_sweep_tells_how_long_the_link_idled() -> None:
    shares = measured([(10.0, 6.0, 9.0, 900)], between=0.0)
    assert (shares.io_sweeps, shares.link_idle) == (1, pytest.approx(0.1))
    assert shares.stream_rate == pytest.approx(100.0)
    assert (shares.computing, shares.waited) == (pytest.approx(4.0), pytest.approx(6.0))
    assert shares.roofline_share == pytest.approx(0.9)


def test_time_between_sweeps_counts_against_the_link_too() -> None:
    """The second sweep's period begins where the first one ended: 2 s of Python, then 8 s of reading."""
    shares = measured([(8.0, 6.0, 8.0, 800)] * 2, between=2.0)
    assert shares.between == pytest.approx(2.0)
    assert shares.link_idle == pytest.approx(2.0 / 18.0)
    assert shares.roofline_share == pytest.approx(16.0 / 18.0)


def test_reading_ahead_between_sweeps_is_not_idle() -> None:
    shares = measured([(8.0, 6.0, 8.0, 800)] * 2, between=2.0, read_between=2.0)
    assert shares.link_idle == pytest.approx(0.0)


def test_compute_bound_sweeps_do_not_count_as_idle() -> None:
    shares = measured([(10.0, 1.0, 2.0, 100)], between=0.0)
    assert (shares.io_sweeps, shares.link_idle) == (0, None)
    assert shares.roofline_share == pytest.approx(0.9)


def test_taking_turns_shows_as_a_low_share_of_the_roofline() -> None:
    assert measured([(10.0, 5.0, 5.0, 100)], between=0.0).roofline_share == pytest.approx(0.5)


def test_a_sweep_that_did_not_happen_does_not_count() -> None:
    shares = measured([(0.1, 0.1, 0.1, 10), (10.0, 6.0, 9.0, 900)], between=5.0)
    assert shares.sweeps == 1
    assert shares.seconds == pytest.approx(10.0)


def test_a_run_without_sweeps_has_no_shares() -> None:
    figures = Shares().figures()
    assert figures["roofline_share"] is None
    assert figures["link_idle_share"] is None
    assert figures["streaming_bytes_per_second"] == 0
