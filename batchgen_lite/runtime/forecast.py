"""What a job will take: its rows run through the real scheduler and engine, with sweeps that cost virtual time.

A job of many tokens is simulated as a scale model: every k-th row (in order of length, so that the sample is fair) with
a k-th of the token budget, the sequences and the pages. Sweeps then come in the same number and order, and each one's
load, multiplied by k, costs what the whole job's would.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from collections.abc import Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from batchgen_lite.offload.pages import PAGE_TOKENS, pages_for
from batchgen_lite.runtime.cost import SweepCost
from batchgen_lite.runtime.interface import RequestSize
from batchgen_lite.runtime.migration import TierState
from batchgen_lite.runtime.planner import MemoryPlan
from batchgen_lite.runtime.scheduler import Limits
from batchgen_lite.runtime.simulation import SimulatedRow, SimulatedRunner, SweepTimes, simulate

Result = TypeVar("Result")
STEPS = 60_000
"""Row steps to simulate at most: a few seconds."""
LEAST_SEQUENCES = 16
"""A scale model with fewer sequences would be too coarse."""
SPARE_PAGES = 8
TAIL_SHARE = 0.5
"""Sweeps at the end that sample less than this share of what the mean sweep does are the tail."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """Times in virtual seconds. Rates in tokens/s: ``decode_rate`` sampled tokens over the whole time,
    ``steady_rate`` over all but the tail, before which ``steady_decoded`` are sampled. ``bound``: "disk" | "link" |
    "compute", what most of the time goes to; ``batch_bound``: what keeps sweeps from carrying more: "KV" | "rows" |
    "tokens". ``evictions``: pauses of rows whose prompts are computed again, ``holds``: of those whose KV is kept."""

    seconds: float
    tail_seconds: float
    decoded: int
    prefilled: int
    sweeps: int
    decode_rate: float
    steady_rate: float
    steady_decoded: int
    tokens_per_sweep: float
    bytes_per_sweep: float
    bytes_read: float
    evictions: int
    holds: int
    most_sequences: int
    bound: str
    batch_bound: str
    scale: float


def forecast(
    sizes: Seq[RequestSize],
    expected: float | None,
    plan: MemoryPlan,
    cost: SweepCost,
    group: int,
    steps: int = STEPS,
    page_bytes: int = 0,
    spill: TierState | None = None,
) -> Forecast:
    """Simulate rows of ``sizes`` under ``plan``, about ``steps`` row steps at most. Rows generate ``expected`` tokens
    each, never more than they may, or all they may if None. ``page_bytes``: of a KV page in all layers, where the job's
    tail makes weights of them (tail.py); 0 = it does not. ``spill``: where KV of rows that sit out may go."""
    rows = [_row(size, expected) for size in sizes]
    total = len(rows)
    scale = _scale(rows, plan, steps)
    rows = sorted(rows, key=lambda row: (row.max_tokens, row.prompt))[scale // 2 :: scale]
    limits = Limits(
        token_budget=max(1, round(plan.token_budget / scale)),
        max_sequences=max(1, round(plan.max_sequences / scale)),
        capacity_pages=max(1, round(plan.kv_pages / scale), max(pages_for(row.prompt + row.decoded) for row in rows)),
    )
    share = total / len(rows)
    if spill is not None:  # a page stands for as many as its row does
        spill = replace(
            spill, free_pages=round(spill.free_pages / share), seconds_per_page=spill.seconds_per_page * share
        )
    page = page_bytes * plan.kv_pages / limits.capacity_pages
    statistics, runner = _run_apart(
        simulate(rows, limits, cost, group=group, scale=share, page_bytes=page, spill=spill)
    )
    tail = _tail(runner.times)
    seconds = runner.clock.now()  # sweeps, and what carrying KV away and back took between them
    steady = runner.times[: len(runner.times) - tail] or runner.times
    return Forecast(
        seconds=seconds,
        tail_seconds=sum(sweep.seconds for sweep in runner.times[len(runner.times) - tail :]),
        decoded=round(statistics.decoded * share),
        prefilled=round(statistics.prefilled * share),
        sweeps=statistics.sweeps,
        decode_rate=statistics.decoded * share / seconds,
        steady_rate=sum(sweep.load.sampled for sweep in steady) / sum(sweep.seconds for sweep in steady),
        steady_decoded=round(sum(sweep.load.sampled for sweep in steady)),
        tokens_per_sweep=sum(sweep.load.tokens for sweep in runner.times) / statistics.sweeps,
        bytes_per_sweep=sum(sweep.bytes_read for sweep in runner.times[1:]) / max(1, statistics.sweeps - 1),
        bytes_read=sum(sweep.bytes_read for sweep in runner.times),
        evictions=round(statistics.evictions * share),
        holds=round(statistics.holds * share),
        most_sequences=round(statistics.most_sequences * share),
        bound=_bound(runner.times),
        batch_bound=_batch_bound(runner, statistics.most_sequences, len(rows)),
        scale=share,
    )


def _run_apart(simulation: Coroutine[Any, Any, Result]) -> Result:
    """Run it to its end on an event loop of its own: the caller may be inside one that runs already."""
    with ThreadPoolExecutor(1, "forecast") as pool:
        return pool.submit(asyncio.run, simulation).result()


def _row(size: RequestSize, expected: float | None) -> SimulatedRow:
    decoded = size.max_tokens if expected is None else max(1, min(size.max_tokens, round(expected)))
    return SimulatedRow(size.prompt_tokens, decoded, size.max_tokens)


def _scale(rows: Seq[SimulatedRow], plan: MemoryPlan, most: int) -> int:
    """Every how manieth row is simulated."""
    steps = sum(row.decoded + row.prompt // max(1, plan.token_budget) + 1 for row in rows)
    longest = max(pages_for(row.prompt + row.max_tokens) for row in rows)
    room = min(plan.max_sequences, len(rows)) // LEAST_SEQUENCES
    return max(1, min(-(-steps // most), room, plan.kv_pages // (4 * longest)))


def _tail(times: Seq[SweepTimes]) -> int:
    """Sweeps at the end that sample little because few rows are left. Tokens of prompts do not count, or a job whose
    rows all start at once would be nothing but tail."""
    mean = sum(sweep.load.sampled for sweep in times) / len(times)
    tail = 0
    while tail < len(times) - 1 and times[len(times) - 1 - tail].load.sampled < TAIL_SHARE * mean:
        tail += 1
    return tail


def _bound(times: Seq[SweepTimes]) -> str:
    """What takes longest in the sweeps that take most of the time."""
    spent = dict.fromkeys(("disk", "link", "compute"), 0.0)
    for sweep in times:
        parts = {"disk": sweep.reading, "link": sweep.linking, "compute": sweep.computing}
        spent[max(parts, key=lambda name: parts[name])] += sweep.seconds
    return max(spent, key=lambda name: spent[name])


def _batch_bound(runner: SimulatedRunner, most: int, rows: int) -> str:
    """Pages are as good as gone when those held back for running rows are all that is left."""
    if most >= rows:
        return "rows"
    return "KV" if runner.least_free <= most // PAGE_TOKENS + SPARE_PAGES else "tokens"
