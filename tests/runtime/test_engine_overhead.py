"""What scheduling costs per sequence and sweep, counted in calls: seconds would tell how busy the machine is."""

from __future__ import annotations

import asyncio
import sys
from types import FrameType

import pytest
from bench_scheduler import PROMPT, IdleRunner, measure

from batchgen_lite.runtime.clock import MonotonicClock
from batchgen_lite.runtime.engine import Run
from batchgen_lite.runtime.simulation import SimulatedRow, SimulatedSource


def calls(live: int, sweeps: int) -> int:
    """Calls, of Python and of C, that a run of ``live`` rows takes from its first admission to its last record."""
    run = Run(
        SimulatedSource([SimulatedRow(PROMPT, sweeps, sweeps)] * live), IdleRunner(live, sweeps), MonotonicClock()
    )
    count = 0

    def note(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    async def drive() -> None:
        sys.setprofile(note)
        try:
            await run.drive()
        finally:
            sys.setprofile(None)

    asyncio.run(drive())
    return count


@pytest.mark.parametrize("live", [100, 1000])
def test_a_decode_step_takes_few_calls_however_many_sequences_live(live: int) -> None:
    """The difference of two runs: what 10 more sweeps cost. 33 calls, mostly len and append, take some 5 us."""
    more = (calls(live, 20) - calls(live, 10)) / (10 * live)
    assert more <= 36


def test_the_bench_measures_what_it_says() -> None:
    figures = measure([20], sweeps=6)
    assert [figure.name for figure in figures] == ["engine, 20 live", "scheduler, 20 live"]
    assert all(figure.value > 0 and figure.ratio > 0 for figure in figures)
