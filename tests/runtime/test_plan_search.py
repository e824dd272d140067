"""The search around a plan: it finds the best of smooth landscapes, and real jobs never get slower by it."""

from __future__ import annotations

import asyncio
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from planned_models import COMPUTE_BOUND, DISK_BOUND, GIB, MIB, PROCESS, paper_model

from batchgen_lite.runtime.forecast import forecast
from batchgen_lite.runtime.interface import RequestSize
from batchgen_lite.runtime.plan_search import SearchStopped, best_plan, search
from batchgen_lite.runtime.planner import JobSize, MemoryPlan, Overrides, plan_candidates, plan_memory
from batchgen_lite.runtime.rates import MachineRates, sweep_cost

MODEL = paper_model()


def candidate(tokens: int, pages: int, resident: int = 0) -> MemoryPlan:
    return MemoryPlan(
        token_budget=tokens,
        max_sequences=64,
        slice_tokens=64,
        kv_pages=pages,
        ring_bytes=1,
        resident_bytes=resident,
        embedding_resident=False,
        workspace_bytes=1,
        transient_bytes=1,
        all_resident=False,
    )


GRID = [candidate(tokens, pages) for tokens in (256, 512, 1024, 2048) for pages in range(10, 27)]


@given(best=st.sampled_from(GRID), start=st.sampled_from(GRID), slope=st.floats(0.2, 5), steps=st.floats(0.2, 5))
def test_a_landscape_with_one_valley_is_solved(best: MemoryPlan, start: MemoryPlan, slope: float, steps: float) -> None:
    asked = []

    def seconds(plan: MemoryPlan) -> float:
        asked.append(plan)
        sizes = (256, 512, 1024, 2048)
        across = abs(sizes.index(plan.token_budget) - sizes.index(best.token_budget))
        return 10 + slope * abs(plan.kv_pages - best.kv_pages) + steps * across

    assert search(GRID, start, seconds) == best
    assert len(asked) == len(set(map(id, asked))) <= len(GRID) // 2  # each once, and far from all of them


def test_a_size_that_gains_nothing_does_not_hide_one_behind_it() -> None:
    by_size = {256: 90.0, 512: 80.0, 1024: 101.0, 2048: 100.0}
    start = next(plan for plan in GRID if plan.token_budget == 2048)
    assert search(GRID, start, lambda plan: by_size[plan.token_budget] + 0.1 * plan.kv_pages).token_budget == 512


def test_of_equals_the_one_with_most_residents_wins() -> None:
    plans = [candidate(512, pages, resident=1000 - pages) for pages in range(10, 20)]
    assert search(plans, plans[-1], lambda plan: 100.0).resident_bytes == 990


@pytest.mark.parametrize("simulations", [0, 2])
def test_a_search_that_is_told_to_stop_simulates_nothing_more(simulations: int) -> None:
    asked = iter([False] * simulations + [True])
    with pytest.raises(SearchStopped):
        best_plan(MODEL, mixed_rows(8), 2 * GIB, PROCESS, Overrides(), DISK_BOUND, stopped=lambda: next(asked))
    assert next(asked, None) is None  # it went on until then


def mixed_rows(count: int) -> list[RequestSize]:
    rng = random.Random(4)
    return [
        RequestSize(max(1, round(rng.lognormvariate(3.9, 0.6))), max(1, round(rng.lognormvariate(2.8, 0.6))))
        for _ in range(count)
    ]


@pytest.mark.parametrize("rates", [DISK_BOUND, COMPUTE_BOUND], ids=["disk", "compute"])
@pytest.mark.parametrize("ram", [900 * MIB, 2 * GIB])
def test_the_forecast_of_the_found_plan_is_no_worse(rates: MachineRates, ram: int) -> None:
    rows = mixed_rows(256)
    job = JobSize.of(rows)

    def seconds(plan: MemoryPlan) -> float:
        assert MODEL.work is not None
        cost = sweep_cost(MODEL.work, rates, plan.resident_bytes, all_resident=plan.all_resident)
        return forecast(rows, None, plan, cost, MODEL.work.group).seconds

    found = best_plan(MODEL, rows, ram, PROCESS, Overrides(), rates)
    first = plan_memory(MODEL, job, ram, PROCESS, Overrides(), rates)
    assert seconds(found) <= seconds(first) * 1.011  # as good as equal: then residents decide
    assert found in plan_candidates(MODEL, job, ram, PROCESS, Overrides(), rates)


def test_a_plan_can_be_searched_from_within_a_running_event_loop() -> None:
    """As an engine does when its job begins."""

    async def inside() -> MemoryPlan:
        return best_plan(MODEL, rows, GIB, PROCESS, Overrides(), DISK_BOUND)

    rows = mixed_rows(64)
    assert asyncio.run(inside()) == best_plan(MODEL, rows, GIB, PROCESS, Overrides(), DISK_BOUND)


def test_unknown_rates_and_wishes_are_left_alone() -> None:
    rows = mixed_rows(64)
    job = JobSize.of(rows)
    assert best_plan(MODEL, rows, GIB, PROCESS, Overrides()) == plan_memory(MODEL, job, GIB, PROCESS, Overrides())
    wish = Overrides(token_budget=128, kv_pages=200)
    found = best_plan(MODEL, rows, 2 * GIB, PROCESS, wish, DISK_BOUND)
    assert (found.token_budget, found.kv_pages) == (128, 200)
