"""Forecasts against the simulated engine, and closed forms against forecasts."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections.abc import Sequence
from itertools import pairwise

import pytest
from planned_models import COMPUTE_BOUND, DISK_BOUND, GIB, MIB, PROCESS, paper_model

from batchgen_lite.runtime.calibration import CalibratingRunner, Calibration
from batchgen_lite.runtime.clock import VirtualClock
from batchgen_lite.runtime.cost import SweepCost, remaining_seconds
from batchgen_lite.runtime.engine import Run
from batchgen_lite.runtime.forecast import Forecast, forecast
from batchgen_lite.runtime.interface import RequestSize, SampledToken
from batchgen_lite.runtime.job_plan import Situation, plan_job
from batchgen_lite.runtime.migration import Tier, TierState
from batchgen_lite.runtime.planner import JobSize, MemoryPlan, Overrides, plan_memory
from batchgen_lite.runtime.rates import MachineRates, sweep_cost
from batchgen_lite.runtime.scheduler import Limits
from batchgen_lite.runtime.simulation import SimulatedRow, SimulatedRunner, SimulatedSource, simulate
from batchgen_lite.runtime.work import PageChanges, Work

MODEL = paper_model()
GROUP = 4


def sizes(rows: int, seed: int = 0) -> list[RequestSize]:
    rng = random.Random(seed)
    return [RequestSize(rng.randint(16, 128), 32) for _ in range(rows)]


def planned(rows: Sequence[RequestSize], ram: int, rates: MachineRates) -> tuple[MemoryPlan, SweepCost]:
    plan = plan_memory(MODEL, JobSize.of(rows), ram, PROCESS, Overrides(), rates)
    assert MODEL.work is not None
    return plan, sweep_cost(MODEL.work, rates, plan.resident_bytes, all_resident=plan.all_resident)


def test_a_small_job_is_forecast_by_the_engine_itself() -> None:
    rows = sizes(64)
    plan, cost = planned(rows, 1 * GIB, DISK_BOUND)
    outlook = forecast(rows, None, plan, cost, GROUP)
    simulated = sorted(rows, key=lambda row: row.prompt_tokens + row.max_tokens)
    limits = Limits(plan.token_budget, plan.max_sequences, plan.kv_pages)
    statistics, _ = asyncio.run(
        simulate([SimulatedRow(row.prompt_tokens, 32, 32) for row in simulated], limits, cost, group=GROUP)
    )
    assert outlook.scale == 1
    assert statistics.ended is not None
    assert outlook.seconds == pytest.approx(statistics.ended)
    assert (outlook.sweeps, outlook.decoded) == (statistics.sweeps, 64 * 32)


def test_a_disk_bound_job_takes_its_bytes_over_the_rate() -> None:
    rows = sizes(64)
    plan, cost = planned(rows, 1 * GIB, dataclasses.replace(DISK_BOUND, read_rate=5e7))
    outlook = forecast(rows, None, plan, cost, GROUP)
    assert outlook.bound == "disk"
    assert outlook.seconds == pytest.approx(outlook.bytes_read / 5e7, rel=0.01)
    assert outlook.tail_seconds < outlook.seconds


@pytest.mark.parametrize("steps", [60_000, 2_000])
def test_kv_that_may_be_spilled_is_kept_where_that_is_cheap(steps: int) -> None:
    rows = [RequestSize(500, 400)] * 160
    plan, cost = planned(rows, 1 * GIB, COMPUTE_BOUND)
    plan = dataclasses.replace(plan, kv_pages=24 * 16)  # of 15 pages a row may need, all run with 8
    nowhere = forecast(rows, None, plan, cost, GROUP, steps=steps)
    quick = forecast(rows, None, plan, cost, GROUP, steps=steps, spill=TierState(Tier.DISK, 100_000, 1e-4))
    slow = forecast(rows, None, plan, cost, GROUP, steps=steps, spill=TierState(Tier.DISK, 100_000, 1e4))
    assert nowhere.holds == slow.holds == 0
    assert nowhere.evictions == slow.evictions > 0
    assert quick.holds > 0 == quick.evictions
    assert quick.seconds < nowhere.seconds == pytest.approx(slow.seconds)
    assert quick.prefilled < nowhere.prefilled


def test_the_tail_begins_when_few_rows_are_left_not_when_no_prompts_are() -> None:
    together = [RequestSize(128, 32)] * 16
    plan, cost = planned(together, 1 * GIB, DISK_BOUND)
    even = forecast(together, None, plan, cost, GROUP)
    assert even.steady_decoded >= 16 * 31  # a prompt that did not fit into the first sweep ends a sweep late
    assert even.tail_seconds < 0.1 * even.seconds
    straggler = forecast([*together, RequestSize(128, 96)], None, plan, cost, GROUP)
    assert 16 * 31 <= straggler.steady_decoded <= 17 * 33  # then more than 60 sweeps for one row
    assert straggler.tail_seconds > straggler.seconds / 5  # two thirds of the sweeps, which touch few experts
    assert straggler.steady_rate > straggler.decode_rate


@pytest.mark.parametrize("ram", [900 * MIB, 2 * GIB, 6 * GIB])
def test_a_scale_model_agrees_with_the_whole(ram: int) -> None:
    rows = sizes(512)
    plan, cost = planned(rows, ram, DISK_BOUND)
    whole = forecast(rows, None, plan, cost, GROUP)
    scaled = forecast(rows, None, plan, cost, GROUP, steps=5000)
    assert (whole.scale, scaled.scale > 3) == (1, True)
    assert scaled.seconds == pytest.approx(whole.seconds, rel=0.12)
    assert scaled.decoded == pytest.approx(whole.decoded, rel=0.02)
    assert scaled.bound == whole.bound


@pytest.mark.parametrize("rates", [DISK_BOUND, COMPUTE_BOUND], ids=["disk", "compute"])
@pytest.mark.parametrize("ram", [1 * GIB, 2 * GIB, 6 * GIB])
def test_the_closed_form_is_near_the_simulation(rates: MachineRates, ram: int) -> None:
    rows = sizes(256)
    plan, cost = planned(rows, ram, rates)
    outlook = forecast(rows, None, plan, cost, GROUP)
    closed = closed_form(rows, plan, cost)
    assert closed == pytest.approx(outlook.seconds, rel=0.25)


def closed_form(rows: Sequence[RequestSize], plan: MemoryPlan, cost: SweepCost) -> float:
    from batchgen_lite.runtime.planner import job_remaining, sequences_at_once

    job = JobSize.of(rows)
    running = sequences_at_once(job, plan.kv_pages, plan.max_sequences)
    loading = cost.resident_bytes / cost.bytes_per_second
    return loading + remaining_seconds(cost, job_remaining(job, GROUP), running, plan.token_budget)


def outlook_of(ram: int, rates: MachineRates, rows: int = 256) -> Forecast:
    return plan_job(Situation(MODEL, sizes(rows), ram, PROCESS, rates)).forecast


def test_more_memory_is_never_much_slower() -> None:
    times = [outlook_of(ram * 512 * MIB, DISK_BOUND).seconds for ram in (2, 3, 4, 6, 10)]
    assert all(later <= earlier * 1.05 for earlier, later in pairwise(times))
    assert times[-1] < 0.8 * times[0]


def test_what_bounds_a_job_is_named() -> None:
    short = outlook_of(700 * MIB, dataclasses.replace(DISK_BOUND, read_rate=5e7))
    assert (short.bound, short.batch_bound) == ("disk", "KV")
    assert outlook_of(6 * GIB, COMPUTE_BOUND).bound == "compute"
    assert outlook_of(2 * GIB, DISK_BOUND, rows=40).batch_bound == "rows"


def test_the_advice_fits_the_bottleneck() -> None:
    def advice(ram: int, rates: MachineRates, rows: int) -> dict[str, float]:
        plan = plan_job(Situation(MODEL, sizes(rows), ram, PROCESS, rates))
        return {change.text: change.gain for change in plan.changes}

    slow_disk = dataclasses.replace(DISK_BOUND, read_rate=5e7)
    disk = advice(1 * GIB, slow_disk, 256)
    assert any("--ram" in text for text in disk)
    assert disk["a disk twice as fast"] == pytest.approx(2.0, rel=0.1)
    assert not any("cores" in text for text in disk)
    compute = advice(6 * GIB, COMPUTE_BOUND, 256)
    assert list(compute) == ["cores twice as fast, or twice as many"]
    half = dataclasses.replace(MODEL, int8_page=MODEL.page // 2 + 4)
    tight = plan_job(Situation(half, sizes(256), 700 * MIB, PROCESS, slow_disk))
    assert tight.forecast.batch_bound == "KV"
    gain = {change.text: change.gain for change in tight.changes}["--kv-dtype int8 (answers differ a little)"]
    int8 = plan_job(
        Situation(dataclasses.replace(half, page=half.int8_page), sizes(256), 700 * MIB, PROCESS, slow_disk)
    )
    assert gain > 1.2
    assert tight.forecast.seconds / int8.forecast.seconds == pytest.approx(gain, rel=0.15)
    assert not any("int8" in change.text for change in int8.changes)
    few = advice(1 * GIB, slow_disk, 16)
    assert next(iter(few)).startswith("twice as many rows")


@pytest.mark.parametrize("read_rate", [5e7, 2e8, 1e9])
@pytest.mark.parametrize("flops", [1e10, 4e10, 2e11])
def test_nothing_twice_as_fast_makes_a_job_more_than_twice_as_fast(read_rate: float, flops: float) -> None:
    rates = dataclasses.replace(DISK_BOUND, read_rate=read_rate, flops=flops)
    plan = plan_job(Situation(MODEL, sizes(64), 1 * GIB, PROCESS, rates))
    gains = {change.text: change.gain for change in plan.changes if "twice as fast" in change.text}
    assert gains
    assert max(gains.values()) <= 2.0 + 1e-9


def test_expected_lengths_shorten_a_job_but_not_its_memory() -> None:
    rows = [RequestSize(50, 200)] * 64
    all_they_may, short = (
        plan_job(Situation(MODEL, rows, 1 * GIB, PROCESS, DISK_BOUND, expected)) for expected in (None, 20.0)
    )
    assert all_they_may.forecast.decoded == 64 * 200
    assert short.forecast.decoded == 64 * 20
    assert short.forecast.seconds < all_they_may.forecast.seconds / 3
    assert JobSize.of(rows, 20.0).pages == JobSize.of(rows).pages


class Watched(SimulatedRunner):
    """Tells after each sweep what the run believes to be left."""

    run_: Run
    calibration: Calibration
    estimates: list[tuple[float, float]]
    slower = 3.0

    async def run(self, work: Sequence[Work], changes: PageChanges) -> list[SampledToken | None]:
        if self.calibration.sweeps:
            left = remaining_seconds(
                self.calibration.cost(), self.run_.remaining(), self.limits_.max_sequences, self.limits_.token_budget
            )
            self.estimates.append((self.clock.now(), left))
        return await super().run(work, changes)


def test_the_time_left_learns_from_the_runs_own_sweeps() -> None:
    """The cores are three times slower than believed, and rows end long before max_tokens."""
    assert MODEL.work is not None
    believed = sweep_cost(MODEL.work, COMPUTE_BOUND, 0, all_resident=True)
    clock = VirtualClock()
    runner = Watched(Limits(512, 64, 1000), believed.calibrated(3.0, None), clock)
    runner.calibration, runner.estimates = Calibration(believed), []
    rows = [SimulatedRow(40, 20 + index % 7, 200) for index in range(400)]
    wrapped = CalibratingRunner(runner, runner.calibration, clock, lambda: 0.0, 1)
    runner.run_ = Run(SimulatedSource(rows), wrapped, clock)
    statistics = asyncio.run(runner.run_.drive())
    assert statistics.ended is not None
    assert runner.calibration.compute_factor == pytest.approx(3.0, rel=0.01)
    middle = [(at, left) for at, left in runner.estimates if 0.3 < at / statistics.ended < 0.8]
    assert middle
    for at, left in middle:
        assert left == pytest.approx(statistics.ended - at, rel=0.25)
