"""What scheduling costs per sequence and sweep: engine, coroutines and scheduler, over a runner that computes nothing.

    python bench/bench_scheduler.py [--live 10000] [--sweeps 20] [--profile]

"engine" is everything between two sweeps: plan, reserve, commit, wake, park, with what a real engine has around it for
its figures and its cost model. "scheduler" is the plan alone. Reference: a little plain Python (figures.py).
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import pstats
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from figures import Figure, best, python_unit, show

from batchgen_lite.offload.pages import PageAllocator
from batchgen_lite.offload.readers.protocol import ReaderStatistics
from batchgen_lite.runtime.calibration import CalibratingRunner, Calibration
from batchgen_lite.runtime.clock import MonotonicClock
from batchgen_lite.runtime.cost import SweepCost
from batchgen_lite.runtime.engine import Run
from batchgen_lite.runtime.interface import SampledToken
from batchgen_lite.runtime.measure import MeasuringRunner
from batchgen_lite.runtime.scheduler import Limits, Snapshot, next_sweep
from batchgen_lite.runtime.sequence import Sequence as Row
from batchgen_lite.runtime.sequence import State
from batchgen_lite.runtime.simulation import SimulatedRow, SimulatedSource
from batchgen_lite.runtime.work import PageChanges, Work

PROMPT = 40


class Sweep(NamedTuple):
    begun: float
    ended: float
    sequences: int


class IdleRunner:
    """Sweeps that take no time; what passes between two of them is the engine's own."""

    def __init__(self, live: int, tokens: int) -> None:
        pages = live * (-(-(PROMPT + tokens) // 64) + 1)
        self.allocator = PageAllocator(pages)
        self.sweeps: list[Sweep] = []
        self._limits = Limits(live * PROMPT, live, pages)
        self._token = SampledToken(1)

    def limits(self) -> Limits:
        return self._limits

    async def run(self, work: Sequence[Work], changes: PageChanges) -> list[SampledToken | None]:
        begun = time.thread_time()
        sampled: list[SampledToken | None] = [self._token] * len(work)
        self.sweeps.append(Sweep(begun, time.thread_time(), len(work)))
        return sampled

    def abort(self) -> None: ...


def engine_seconds(live: int, sweeps: int) -> float:
    """Best seconds per sequence between two decoding sweeps."""
    clock = MonotonicClock()
    idle = IdleRunner(live, sweeps)
    measuring = MeasuringRunner(idle, clock, ReaderStatistics, lambda: 0.0)
    runner = CalibratingRunner(measuring, Calibration(SweepCost(0.0, 1.0, 0.0)), clock, lambda: 0.0, 4)
    source = SimulatedSource([SimulatedRow(PROMPT, sweeps, sweeps)] * live)
    asyncio.run(Run(source, runner, clock).drive())
    return min(
        (later.begun - earlier.ended) / live
        for earlier, later in pairwise(idle.sweeps[1:])
        if earlier.sequences == later.sequences == live
    )


def plan_seconds(live: int) -> float:
    """Best seconds per sequence for the plan of a decoding sweep."""
    allocator = PageAllocator(live * 2)
    rows = []
    for index in range(live):
        row = Row(index, range(PROMPT), 100, allocator)
        row.admission = index
        row.move(State.RUNNING)
        row.table.reserve(PROMPT + 1)
        row.table.commit(PROMPT)
        row.append(1)
        rows.append(row)
    snapshot = Snapshot(rows, (), (), allocator.free, 64, Limits(live, live, allocator.capacity))
    return best(lambda: next_sweep(snapshot), 7) / live


def measure(live: Sequence[int] = (100, 1_000, 10_000), sweeps: int = 12) -> list[Figure]:
    """For ``bench/run.py``."""
    unit = python_unit()
    seconds = {}
    for count in live:
        seconds[f"engine, {count:,} live"] = engine_seconds(count, sweeps)
        seconds[f"scheduler, {count:,} live"] = plan_seconds(count)
    unit = min(unit, python_unit())
    return [Figure(name, value * 1e6, "us/sequence and sweep", value / unit) for name, value in seconds.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description="Scheduling cost per sequence and sweep.")
    parser.add_argument("--live", type=int, nargs="*", default=[100, 1_000, 10_000])
    parser.add_argument("--sweeps", type=int, default=20)
    parser.add_argument("--profile", action="store_true", help="show where the engine's time goes")
    arguments = parser.parse_args()
    if arguments.profile:
        with cProfile.Profile() as profile:
            engine_seconds(max(arguments.live), arguments.sweeps)
        pstats.Stats(profile).sort_stats("tottime").print_stats(28)
        return
    show(measure(arguments.live, arguments.sweeps))


if __name__ == "__main__":
    main()
