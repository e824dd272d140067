"""The best division of memory for a job, found by running the job through its scheduler under the virtual clock.

The closed form in cost.py treats all sweeps of a phase as alike. It ranks plans well enough to start from, but not when
lengths vary: how the longest rows overlap with the rest, and how few experts the last sweeps touch, decides between a
larger batch and more resident weights (measured on a job of 512 chat rows: 19 % between its choice and the best). So
the choice is refined by simulation: along the number of KV pages, then over all numbers of tokens of a sweep, then
along pages again, in shrinking steps. About twenty simulations of a few thousand row steps, once per job.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq

from batchgen_lite.runtime.forecast import forecast
from batchgen_lite.runtime.interface import RequestSize
from batchgen_lite.runtime.planner import (
    AS_GOOD,
    JobSize,
    MemoryPlan,
    ModelSize,
    Overrides,
    plan_candidates,
    plan_memory,
)
from batchgen_lite.runtime.rates import MachineRates, sweep_cost

ROWS = 2048
"""Of a larger job so many rows are simulated, evenly spaced: enough to reach the steady state and to end."""
STEPS = 4_000
"""Row steps of one simulation: some tenths of a second."""


class SearchStopped(Exception):
    """The search was told to stop before it had an answer."""


def best_plan(
    model: ModelSize,
    sizes: Seq[RequestSize],
    ram: int,
    process: int,
    wish: Overrides,
    rates: MachineRates | None = None,
    expected: float | None = None,
    stopped: Callable[[], bool] = lambda: False,
) -> MemoryPlan:
    """Divide ``ram`` bytes as ``plan_memory`` does, then look around its choice by simulation where rates are known.

    ``sizes``: all rows; each generates ``expected`` tokens where it may, or all it may if None. Raises BudgetError,
    and SearchStopped once ``stopped``, which is asked before every simulation, says so.
    """
    job = JobSize.of(sizes, expected)
    start = plan_memory(model, job, ram, process, wish, rates)
    work = model.work
    if rates is None or work is None or not sizes:
        return start
    candidates = plan_candidates(model, job, ram, process, wish, rates)
    page_bytes = 0 if wish.fixed_division else model.page
    sample = sizes[:: -(-len(sizes) // ROWS)]

    def seconds(plan: MemoryPlan) -> float:
        if stopped():
            raise SearchStopped
        cost = sweep_cost(work, rates, plan.resident_bytes, all_resident=plan.all_resident)
        return forecast(sample, expected, plan, cost, work.group, steps=STEPS, page_bytes=page_bytes).seconds

    return search(candidates, start, seconds)


def search(candidates: Seq[MemoryPlan], start: MemoryPlan, seconds: Callable[[MemoryPlan], float]) -> MemoryPlan:
    """The fastest of ``candidates`` that a look around from ``start``, one of them, finds; of those as good as equal
    the one with the most resident bytes."""
    sizes = sorted({plan.token_budget for plan in candidates})
    columns = [
        sorted((plan for plan in candidates if plan.token_budget == tokens), key=lambda plan: plan.kv_pages)
        for tokens in sizes
    ]
    seen: dict[tuple[int, int], float] = {}

    def cost(column: int, row: int) -> float:
        if (column, row) not in seen:
            seen[column, row] = seconds(columns[column][row])
        return seen[column, row]

    def along_pages(column: int, row: int, step: int) -> int:
        while step:
            around = [at for at in (row - step, row, row + step) if 0 <= at < len(columns[column])]
            nearest = min(around, key=lambda at: cost(column, at))
            if nearest == row:
                step //= 2
            row = nearest
        return row

    column = sizes.index(start.token_budget)
    row = along_pages(column, columns[column].index(start), max(1, len(columns[column]) // 4))
    # All of the few sizes: behind one that gains nothing another may gain a tenth.
    beside = [min(row, len(plans) - 1) for plans in columns]
    column = min(range(len(sizes)), key=lambda at: (cost(at, beside[at]), abs(at - column)))
    along_pages(column, beside[column], 2)
    best = min(seen.values())
    good = [columns[column][row] for (column, row), time in seen.items() if time <= best * AS_GOOD]
    return max(good, key=lambda plan: (plan.resident_bytes, -plan.token_budget))
