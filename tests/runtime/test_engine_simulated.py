"""The engine and its scheduler on a virtual clock: exact schedules, no sleeps, no tensors."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest

from batchgen_lite.errors import RowError, StorageError
from batchgen_lite.offload.pages import PAGE_TOKENS, pages_for
from batchgen_lite.runtime.clock import VirtualClock
from batchgen_lite.runtime.cost import SweepCost, SweepLoad
from batchgen_lite.runtime.engine import Run
from batchgen_lite.runtime.interface import Finish, SampledToken, SequenceRequest
from batchgen_lite.runtime.migration import MigrationChoice, Tier, TierState, prefill_again_seconds
from batchgen_lite.runtime.scheduler import Limits
from batchgen_lite.runtime.sequence import State
from batchgen_lite.runtime.simulation import (
    SimulatedOutput,
    SimulatedRow,
    SimulatedRunner,
    SimulatedSource,
    SimulatedTier,
    simulate,
)
from batchgen_lite.runtime.work import PageChanges, Work

COST = SweepCost(streamed_bytes=1e9, bytes_per_second=1e9, seconds_per_token=0.001)


def drive(
    rows: Sequence[SimulatedRow],
    limits: Limits,
    source: SimulatedSource | None = None,
    *,
    cost: SweepCost = COST,
    tier: Callable[[VirtualClock], SimulatedTier] | None = None,
) -> tuple[Run, Checked]:
    clock = VirtualClock()
    runner = Checked(limits, cost, clock)
    run = Run(source or SimulatedSource(rows), runner, clock, lower=tier(clock) if tier is not None else None)
    runner.run_ = run
    asyncio.run(run.drive())
    return run, runner


class Checked(SimulatedRunner):
    """Checks every invariant of DESIGN section 2 before each sweep."""

    run_: Run

    async def run(self, work: Sequence[Work], changes: PageChanges) -> list[SampledToken | None]:
        held: dict[int, int] = {}
        for live in self.run_._live.values():
            planned = sum(item.count for item in work if item.sequence is live.sequence)
            live.sequence.check(planned)
            for page in live.sequence.table.pages:
                held[page] = held.get(page, 0) + 1
        for page in range(self.allocator.capacity):
            assert self.allocator.references(page) == held.get(page, 0)
        assert self.allocator.free == self.allocator.capacity - len(held)
        tier = self.run_._paused.lower
        if tier is not None:
            live = [live.sequence for live in self.run_._live.values()]
            held_positions = {s.index: pages_for(s.held) for s in live if s.state is State.HELD}
            assert tier.kept == held_positions  # type: ignore[attr-defined]
            assert sum(held_positions.values()) <= tier.pages  # type: ignore[attr-defined]
        assert sum(item.count for item in work) <= self.limits_.token_budget
        assert len(work) <= self.limits_.max_sequences
        return await super().run(work, changes)


def test_one_row_takes_a_prefill_and_its_decode_steps() -> None:
    run, runner = drive([SimulatedRow(10, 3, 3)], Limits(64, 4, 4))
    assert runner.sweeps == [[(0, 0, 10)], [(0, 10, 1)], [(0, 11, 1)]]
    assert run.statistics.ended == pytest.approx(3.0)  # three sweeps bound by reading 1 GB at 1 GB/s
    assert run.statistics.rows_done == 1


def test_decode_steps_ride_with_prompts_within_the_token_budget() -> None:
    rows = [SimulatedRow(40, 5, 5) for _ in range(4)]
    _, runner = drive(rows, Limits(50, 4, 16))
    assert runner.sweeps[0] == [(0, 0, 40), (1, 0, 10)]
    assert runner.sweeps[1] == [(0, 40, 1), (1, 10, 30), (2, 0, 19)]
    assert max(sum(count for _, _, count in sweep) for sweep in runner.sweeps) <= 50


def test_longest_expected_rows_start_first() -> None:
    rows = [SimulatedRow(5, 2, 2), SimulatedRow(50, 2, 2), SimulatedRow(5, 60, 60)]
    _, runner = drive(rows, Limits(64, 1, 8))
    order = list(dict.fromkeys(row for sweep in runner.sweeps for row, _, _ in sweep))
    assert order == [2, 1, 0]


def test_rows_refill_as_soon_as_others_end() -> None:
    rows = [SimulatedRow(8, 4, 4) for _ in range(64)]
    run, runner = drive(rows, Limits(128, 16, 64))
    assert run.statistics.rows_done == 64
    assert all(len(sweep) == 16 for sweep in runner.sweeps[:-1])
    assert len(runner.sweeps) == 64 * 4 // 16


def test_pressure_evicts_the_last_admitted_and_everything_ends() -> None:
    rows = [SimulatedRow(60, 200, 200) for _ in range(8)]
    run, _ = drive(rows, Limits(256, 8, 12))
    assert run.statistics.rows_done == 8
    assert run.statistics.evictions > 0


def test_the_first_admitted_is_never_evicted() -> None:
    seen: list[int] = []

    class Watching(Checked):
        async def run(self, work: Sequence[Work], changes: PageChanges) -> list[SampledToken | None]:
            evicted = [live.sequence for live in self.run_._live.values() if live.sequence.state is State.EVICTED]
            running = [live.sequence for live in self.run_._live.values() if live.sequence.state is State.RUNNING]
            if evicted:
                seen.append(1)
                assert min(s.admission for s in running) < min(s.admission for s in evicted)
            return await super().run(work, changes)

    clock = VirtualClock()
    runner = Watching(Limits(128, 16, 9), COST, clock)
    run = runner.run_ = Run(SimulatedSource([SimulatedRow(30, 150, 150)] * 12), runner, clock)
    asyncio.run(run.drive())
    assert seen
    assert run.statistics.rows_done == 12


def test_a_prompt_that_cannot_fit_even_alone_fails_by_itself() -> None:
    source = SimulatedSource([SimulatedRow(1000, 2, 2), SimulatedRow(10, 2, 2)])
    run, _ = drive([], Limits(64, 4, 3), source)
    assert run.statistics.rows_done == 1
    assert isinstance(source.errors[0], RowError)
    assert source.errors[0].code == "capacity"


def test_a_row_that_outgrows_the_cache_fails_and_the_others_go_on() -> None:
    rows = [SimulatedRow(10, 1000, 1000), SimulatedRow(10, 2, 2), SimulatedRow(10, 100, 100)]
    run, runner = drive(rows, Limits(64, 4, 3))
    assert (run.statistics.rows_done, run.statistics.rows_failed) == (2, 1)
    assert runner.allocator.free == 3


def test_one_rows_exception_leaves_its_siblings_alone() -> None:
    class Failing(SimulatedSource):
        def open(self, index: int) -> tuple[SequenceRequest, SimulatedOutput]:
            if index == 1:
                raise RowError("template_error", "no")
            request, output = super().open(index)
            if index == 2:

                def accept(token: SampledToken) -> Finish | None:
                    raise ValueError("a bug in one row's output")

                output.accept = accept  # type: ignore[method-assign]
            return request, output

    source = Failing([SimulatedRow(10, 5, 5) for _ in range(5)])
    run, runner = drive([], Limits(64, 8, 8), source)
    assert (run.statistics.rows_done, run.statistics.rows_failed) == (3, 2)
    assert isinstance(source.errors[1], RowError)
    assert runner.allocator.free == 8


def test_a_disk_that_takes_no_more_records_ends_the_run() -> None:
    class Full(SimulatedOutput):
        def done(self, finish: Finish) -> None:
            raise StorageError("disk full")

    class Source(SimulatedSource):
        def open(self, index: int) -> tuple[SequenceRequest, SimulatedOutput]:
            request, _ = super().open(index)
            return request, Full(self._rows[index], self.finished, index)

    with pytest.raises(StorageError, match="disk full"):
        drive([], Limits(64, 8, 8), Source([SimulatedRow(10, 2, 2), SimulatedRow(10, 9, 9)]))


def test_memory_errors_make_the_sweep_smaller_and_lose_nothing() -> None:
    class Tight(SimulatedRunner):
        async def run(self, work: Sequence[Work], changes: PageChanges) -> list[SampledToken | None]:
            if sum(item.count for item in work) > 40:
                self.limits_ = Limits(self.limits_.token_budget // 2, self.limits_.max_sequences, 64)
                raise MemoryError
            return await super().run(work, changes)

    clock = VirtualClock()
    run = Run(SimulatedSource([SimulatedRow(30, 4, 4)] * 8), Tight(Limits(256, 8, 64), COST, clock), clock)
    statistics = asyncio.run(run.drive())
    assert statistics.rows_done == 8
    assert statistics.sweeps_retried == 3


def test_stop_ends_the_run_between_two_commits() -> None:
    class Stopping(SimulatedRunner):
        async def run(self, work: Sequence[Work], changes: PageChanges) -> list[SampledToken | None]:
            if len(self.sweeps) == 3:
                run.stop()
            return await super().run(work, changes)

    clock = VirtualClock()
    runner = Stopping(Limits(64, 8, 32), COST, clock)
    source = SimulatedSource([SimulatedRow(10, 50, 50) for _ in range(4)])
    run = Run(source, runner, clock)
    statistics = asyncio.run(run.drive())
    assert statistics.stopped_early
    assert source.finished == []
    assert runner.allocator.free == 32


SLOW_COMPUTE = SweepCost(streamed_bytes=1e9, bytes_per_second=1e9, seconds_per_token=0.05)


def test_long_contexts_are_held_when_computing_is_slow() -> None:
    """A page costs 1 s there and back; its 64 tokens cost 3.2 s to compute again, for which sweeps have no slack."""
    rows = [SimulatedRow(500, 300, 300) for _ in range(6)]
    limits = Limits(512, 6, 40)

    def tier(clock: VirtualClock) -> SimulatedTier:
        return SimulatedTier(clock, 100, 1.0, SLOW_COMPUTE)

    dropping, _ = drive(rows, limits, cost=SLOW_COMPUTE)
    keeping, runner = drive(rows, limits, cost=SLOW_COMPUTE, tier=tier)
    assert keeping.statistics.holds > 0
    assert keeping.statistics.evictions == 0
    assert keeping.statistics.prefilled == 6 * 500  # nothing was computed twice
    assert dropping.statistics.prefilled > keeping.statistics.prefilled
    assert keeping.clock.now() < dropping.clock.now()
    assert runner.allocator.free == 40
    assert keeping._paused.lower.kept == {}  # type: ignore[union-attr]


def test_short_contexts_are_computed_again_within_the_slack() -> None:
    """Sweeps read for a second and compute for much less: a prefill beside them costs nothing, a page's way does."""
    rows = [SimulatedRow(40, 150, 150) for _ in range(12)]
    run, _ = drive(rows, Limits(256, 12, 12), tier=lambda clock: SimulatedTier(clock, 100, 0.001, COST))
    assert run.statistics.evictions > 0
    assert run.statistics.holds == 0


@pytest.mark.parametrize("pages", [0, 9, 1000])
def test_a_tier_takes_whom_it_has_room_for(pages: int) -> None:
    rows = [SimulatedRow(300, 600, 600) for _ in range(8)]

    def tier(clock: VirtualClock) -> SimulatedTier:
        return SimulatedTier(clock, pages, 0.1, SLOW_COMPUTE)

    run, _ = drive(rows, Limits(512, 8, 40), cost=SLOW_COMPUTE, tier=tier)
    assert run.statistics.rows_done == 8
    assert (run.statistics.holds > 0) == (pages > 0)
    assert (run.statistics.evictions > 0) == (pages < 1000)


def test_nobody_is_admitted_while_a_held_sequence_waits() -> None:
    seen: list[tuple[set[int], set[int]]] = []  # of every sweep: who is paused, who is live

    class Watching(Checked):
        async def run(self, work: Sequence[Work], changes: PageChanges) -> list[SampledToken | None]:
            live = [live.sequence for live in self.run_._live.values()]
            seen.append(({s.index for s in live if s.state is State.HELD}, {s.index for s in live}))
            return await super().run(work, changes)

    clock = VirtualClock()
    runner = Watching(Limits(512, 6, 30), SLOW_COMPUTE, clock)
    source = SimulatedSource([SimulatedRow(400, 300, 300) for _ in range(12)])
    run = runner.run_ = Run(source, runner, clock, lower=SimulatedTier(clock, 100, 1.0, SLOW_COMPUTE))
    asyncio.run(run.drive())
    assert run.statistics.evictions == 0
    assert run.statistics.holds > 0
    waited = [(before, after) for before, after in pairwise(seen) if before[0] & after[0]]
    assert len(waited) > 10
    assert all(after[1] <= before[1] for before, after in waited)


@pytest.mark.parametrize("fails", [{0}, {1}, {0, 1, 2, 3}, set(range(0, 40, 3))], ids=str)
def test_holds_and_restores_that_fail_end_as_evictions(fails: set[int]) -> None:
    rows = [SimulatedRow(500, 300, 300) for _ in range(6)]
    source = SimulatedSource(rows)
    run, runner = drive(
        rows,
        Limits(512, 6, 40),
        source,
        cost=SLOW_COMPUTE,
        tier=lambda clock: SimulatedTier(clock, 100, 1.0, SLOW_COMPUTE, fails=frozenset(fails)),
    )
    assert sorted(source.finished) == list(range(6))
    assert run.statistics.evictions > 0
    assert runner.allocator.free == 40


def test_the_choice_compares_the_way_there_and_back_with_computing_again() -> None:
    busy = SweepLoad(100, 100)
    state = TierState(Tier.DISK, 1000, 0.5)
    slow = MigrationChoice((state,), SLOW_COMPUTE)
    assert slow.choose(640, {Tier.DISK: 1000}, busy, 512) is Tier.DISK  # 10 pages: 5 s against 32 s
    assert slow.choose(640, {Tier.DISK: 9}, busy, 512) is None
    assert slow.choose(0, {Tier.DISK: 9}, busy, 512) is None
    assert MigrationChoice((), SLOW_COMPUTE).choose(640, {}, busy, 512) is None
    host = MigrationChoice((TierState(Tier.HOST, 10, 0.01), state), SLOW_COMPUTE)
    assert host.choose(640, {Tier.HOST: 10, Tier.DISK: 1000}, busy, 512) is Tier.HOST
    assert host.choose(700, {Tier.HOST: 10, Tier.DISK: 1000}, busy, 512) is Tier.DISK  # the host is full
    assert prefill_again_seconds(SLOW_COMPUTE, 640, busy, 512, 1) == pytest.approx(640 * 0.05)
    assert prefill_again_seconds(COST, 640, busy, 2000, 1) == pytest.approx(0.0)  # 740 tokens hide behind the reading
    assert prefill_again_seconds(COST, 1900, busy, 2000, 1) == pytest.approx(1.0)


def test_nothing_is_kept_back_for_rows_whose_pages_are_all_reserved() -> None:
    """64 rows of one page each: the last ones enter though no page is left over for those that run."""
    rows = [SimulatedRow(30, 20, 20) for _ in range(130)]
    _, runner = drive(rows, Limits(130 * 30, 200, 130))
    assert len(runner.sweeps[0]) == 130


@pytest.mark.parametrize("seed", range(8))
def test_random_jobs_with_a_lower_tier_answer_every_row_once(seed: int) -> None:
    rng = random.Random(seed)
    rows = []
    for _ in range(rng.randint(1, 60)):
        most = rng.randint(1, 300)
        rows.append(SimulatedRow(rng.randint(1, 600), rng.randint(1, most), most))
    largest = max(pages_for(row.prompt + row.decoded) for row in rows)
    limits = Limits(rng.randint(32, 600), rng.randint(1, 32), largest + rng.randint(0, 30))
    fails = frozenset(rng.sample(range(100), 10))
    pages, seconds = rng.randint(1, 60), 10 ** rng.uniform(-2, 1)
    source = SimulatedSource(rows)
    run, runner = drive(
        rows,
        limits,
        source,
        cost=SLOW_COMPUTE,
        tier=lambda clock: SimulatedTier(clock, pages, seconds, SLOW_COMPUTE, fails=fails),
    )
    assert sorted(source.finished) == list(range(len(rows)))
    assert runner.allocator.free == limits.capacity_pages
    assert run.statistics.rows_failed == 0


@pytest.mark.parametrize("seed", range(12))
def test_random_jobs_end_with_every_row_answered_once(seed: int) -> None:
    rng = random.Random(seed)
    rows = []
    for _ in range(rng.randint(1, 120)):
        most = rng.randint(1, 300)
        rows.append(SimulatedRow(rng.randint(1, 400), rng.randint(1, most), most))
    largest = max(pages_for(row.prompt + row.decoded) for row in rows)
    limits = Limits(rng.randint(32, 600), rng.randint(1, 32), largest + rng.randint(0, 40))
    source = SimulatedSource(rows)
    run, runner = drive(rows, limits, source)
    assert sorted(source.finished) == list(range(len(rows)))
    assert runner.allocator.free == limits.capacity_pages
    assert run.statistics.rows_failed == 0


def test_enough_pages_and_equal_rows_need_the_fewest_sweeps() -> None:
    rows = [SimulatedRow(64, 16, 16) for _ in range(32)]
    statistics, _ = asyncio.run(simulate(rows, Limits(32 * 64, 32, 32 * pages_for(64 + PAGE_TOKENS)), COST))
    assert statistics.sweeps == 16
    assert statistics.ended == pytest.approx(max(1.0, 32 * 64 * 0.001) + 15 * 1.0)
