"""A job planned and forecast without running it, and what would make it faster. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

from batchgen_lite.errors import BudgetError
from batchgen_lite.runtime.cost import SweepCost, remaining_seconds
from batchgen_lite.runtime.device_planner import plan_device_memory
from batchgen_lite.runtime.forecast import Forecast, forecast
from batchgen_lite.runtime.interface import RequestSize
from batchgen_lite.runtime.migration import TierState
from batchgen_lite.runtime.plan_search import best_plan
from batchgen_lite.runtime.planner import (
    JobSize,
    MemoryPlan,
    ModelSize,
    Overrides,
    job_remaining,
    plan_candidates,
    plan_memory,
    sequences_at_once,
)
from batchgen_lite.runtime.rates import MachineRates, sweep_cost

GIB = 1 << 30
WORTH_SAYING = 1.1  # times as fast, from which a change is worth a line
MORE_RAM = (1, 2, 4, 8, 16, 32, 64)  # GiB
NEARLY_BEST = 0.8  # of what the largest change brings, from which a smaller one is preferred


@dataclass(frozen=True, slots=True)
class SpillRoom:
    """Where KV of rows that have to wait may go: ``nbytes`` in ``directory``, as a tier of whole pages."""

    directory: str
    nbytes: int
    tier: TierState


@dataclass(frozen=True, slots=True)
class Situation:
    """Everything that a plan follows from. ``ram`` and ``process`` in bytes; ``expected``: tokens that a row generates
    on average, None = all it may; ``vram``: usable bytes of a device that has memory of its own, None = the CPU."""

    model: ModelSize
    sizes: Seq[RequestSize]
    ram: int
    process: int
    rates: MachineRates
    expected: float | None = None
    vram: int | None = None
    spill: SpillRoom | None = None

    @property
    def job(self) -> JobSize:
        return JobSize.of(self.sizes, self.expected)


@dataclass(frozen=True, slots=True)
class Change:
    """Something to do, and how many times as fast the job would be."""

    text: str
    gain: float


@dataclass(frozen=True, slots=True)
class JobPlan:
    """Where memory goes, what the job takes, and the changes that would help, the cheapest kind first."""

    memory: MemoryPlan
    cost: SweepCost
    forecast: Forecast
    changes: tuple[Change, ...]


def plan_job(situation: Situation) -> JobPlan:
    """Plan and simulate. BudgetError, with the smallest budget, if the job does not fit."""
    work, rates = situation.model.work, situation.rates
    assert work is not None
    if situation.vram is not None:
        memory, cost = _planned(situation)
    else:
        memory = best_plan(
            situation.model,
            situation.sizes,
            situation.ram,
            situation.process,
            Overrides(),
            rates.known,
            situation.expected,
        )
        cost = sweep_cost(work, rates, memory.resident_bytes, all_resident=memory.all_resident)
    page_bytes = situation.model.page if situation.vram is None else 0
    tier = None if situation.spill is None else situation.spill.tier
    outlook = forecast(situation.sizes, situation.expected, memory, cost, work.group, page_bytes=page_bytes, spill=tier)
    return JobPlan(memory, cost, outlook, tuple(_changes(situation, outlook)))


def _planned(situation: Situation) -> tuple[MemoryPlan, SweepCost]:
    """Where rates are known the division that is fastest in closed form. All are compared, whatever the rates: else a
    disk twice as fast could seem to make a job three times as fast, by allowing a division that was there before."""
    model, job, ram, process = situation.model, situation.job, situation.ram, situation.process
    if situation.vram is not None:
        plans = [plan_device_memory(model, job, ram, process, situation.vram, Overrides())]
    elif situation.rates.known is None:
        plans = [plan_memory(model, job, ram, process, Overrides())]
    else:
        plans = plan_candidates(model, job, ram, process, Overrides(), situation.rates)
    costs = [(plan, _cost(situation, plan)) for plan in plans]
    return min(costs, key=lambda entry: _closed_form(job, entry[0], entry[1], _group(situation)))


def _cost(situation: Situation, plan: MemoryPlan) -> SweepCost:
    rates, work = situation.rates, situation.model.work
    assert work is not None
    kept = plan.resident_bytes + plan.device_resident_bytes
    cost = sweep_cost(work, rates, kept, all_resident=plan.all_resident)
    return replace(cost, linked_bytes=max(0.0, cost.linked_bytes - plan.device_resident_bytes))


def _closed_form(job: JobSize, plan: MemoryPlan, cost: SweepCost, group: int) -> float:
    """Seconds of the job, with all sweeps of a phase taken as alike."""
    running = sequences_at_once(job, plan.kv_pages, plan.max_sequences)
    loading = cost.resident_bytes / cost.bytes_per_second
    return loading + remaining_seconds(cost, job_remaining(job, group), running, plan.token_budget)


def _group(situation: Situation) -> int:
    work = situation.model.work
    assert work is not None
    return work.group


def _seconds(situation: Situation) -> float:
    """The job's time in closed form: comparing variants needs no simulation."""
    return _closed_form(situation.job, *_planned(situation), _group(situation))


def _changes(situation: Situation, outlook: Forecast) -> Iterator[Change]:
    """Changes worth a line: free ones, then memory, then other hardware."""
    now = _seconds(situation)
    if outlook.batch_bound == "rows" and outlook.bound != "compute":
        twice = replace(situation, sizes=[*situation.sizes, *situation.sizes])
        gain = _gain(2 * now, twice)
        if gain >= WORTH_SAYING:
            yield Change("twice as many rows in one job (a sweep has room for more)", gain)
    model = situation.model
    if 0 < model.int8_page < model.page:
        gain = _gain(now, replace(situation, model=replace(model, page=model.int8_page)))
        if gain >= WORTH_SAYING:
            yield Change("--kv-dtype int8 (answers differ a little)", gain)
    memory = [(more, _gain(now, replace(situation, ram=situation.ram + more * GIB))) for more in MORE_RAM]
    best = max(gain for _, gain in memory)
    if best >= WORTH_SAYING:
        more, gain = next((m, g) for m, g in memory if g - 1 >= NEARLY_BEST * (best - 1))
        least, little = next((m, g) for m, g in memory if g >= WORTH_SAYING)
        if least < more:
            yield Change(f"+{least} GiB of --ram", little)
        yield Change(f"+{more} GiB of --ram", gain)
    if situation.vram is not None:
        gains = [(more, _gain(now, replace(situation, vram=situation.vram + more * GIB))) for more in MORE_RAM]
        more, gain = max(gains, key=lambda entry: (round(entry[1], 2), -entry[0]))
        if gain >= WORTH_SAYING:
            yield Change(f"a card with {more} GiB more of memory", gain)
    rates = situation.rates
    for text, faster in (
        ("a disk twice as fast", replace(rates, read_rate=2 * rates.read_rate)),
        ("cores twice as fast, or twice as many", rates.with_cores(2.0)),
    ):
        gain = _gain(now, replace(situation, rates=faster))
        if gain >= WORTH_SAYING:
            yield Change(text, gain)


def _gain(now: float, variant: Situation) -> float:
    try:
        return now / max(1e-9, _seconds(variant))
    except BudgetError:
        return 0.0
