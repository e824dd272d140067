"""What scheduling costs per sequence and sweep, counted in calls: seconds would tell how busy the machine is."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from bench_scheduler import PROMPT, IdleRunner, measure
from call_counts import calls_of

from batchgen_lite.runtime.clock import MonotonicClock
from batchgen_lite.runtime.engine import Run
from batchgen_lite.runtime.interface import SampledToken
from batchgen_lite.runtime.simulation import SimulatedRow, SimulatedSource
from batchgen_lite.runtime.work import PageChanges, Work


def calls(live: int, sweeps: int) -> int:
    """Calls, of Python and of C, that a run of ``live`` rows takes from its first admission to its last record."""
    run = Run(
        SimulatedSource([SimulatedRow(PROMPT, sweeps, sweeps)] * live), IdleRunner(live, sweeps), MonotonicClock()
    )
    return calls_of(run)


@pytest.mark.parametrize("live", [100, 1000])
def test_a_decode_step_takes_few_calls_however_many_sequences_live(live: int) -> None:
    """The difference of two runs: what 10 more sweeps cost. 33 calls, mostly len and append, take some 5 us."""
    more = (calls(live, 20) - calls(live, 10)) / (10 * live)
    assert more <= 36


def test_the_bench_measures_what_it_says() -> None:
    figures = measure([20], sweeps=6)
    assert [figure.name for figure in figures] == ["engine, 20 live", "scheduler, 20 live"]
    assert all(figure.value > 0 and figure.ratio > 0 for figure in figures)


def test_the_work_left_is_counted_once_a_sweep_however_often_it_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """A display asks four times a second, and counting goes through every live row."""
    counted: list[int] = []
    count = Run._count_remaining
    monkeypatch.setattr(Run, "_count_remaining", lambda self: (counted.append(1), count(self))[1])

    class Watched(IdleRunner):
        async def run(self, work: Sequence[Work], changes: PageChanges) -> list[SampledToken | None]:
            left.append([run.remaining().decode_tokens for _ in range(5)])
            return await super().run(work, changes)

    left: list[list[float]] = []
    run = Run(SimulatedSource([SimulatedRow(PROMPT, 8, 8)] * 10), Watched(10, 8), MonotonicClock())
    asyncio.run(run.drive())
    assert len(counted) == len(left) == 8
    assert [values[0] for values in left] == [10.0 * tokens for tokens in range(8, 0, -1)]
