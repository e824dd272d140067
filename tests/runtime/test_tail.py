"""The tail of a job: KV memory that nobody can need becomes weights. The same bits, fewer bytes, and no page short."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
from engine_runs import Collecting, Prompts, Result, random_prompts, run_engine
from equality import assert_same_bits
from make_checkpoint import Shape, write_checkpoint
from planned_models import DISK_BOUND, MIB, PROCESS, paper_model
from stub_job import command, read_records, write_lines
from tiny_tokenizers import train_byte_level, write_directory
from watch_rss import Watched, watch

from batchgen_lite.errors import BudgetError
from batchgen_lite.offload.host_tier import HostTier
from batchgen_lite.offload.pages import BlockTable, pages_for
from batchgen_lite.offload.spill_file import SpillOptions
from batchgen_lite.runtime.build import LocalEngine, build_engine
from batchgen_lite.runtime.clock import VirtualClock
from batchgen_lite.runtime.cost import SweepCost
from batchgen_lite.runtime.engine import Run
from batchgen_lite.runtime.forecast import forecast
from batchgen_lite.runtime.interface import RequestSize, SequenceRequest
from batchgen_lite.runtime.migration import MigrationChoice, Tier
from batchgen_lite.runtime.options import EngineOptions
from batchgen_lite.runtime.planner import JobSize, Overrides, plan_memory
from batchgen_lite.runtime.pool_to_weights import PoolToWeights
from batchgen_lite.runtime.rates import sweep_cost
from batchgen_lite.runtime.scheduler import Limits
from batchgen_lite.runtime.simulation import SimulatedRow, SimulatedRunner, SimulatedSource, SimulatedTail, simulate
from batchgen_lite.runtime.tail import keeping, least_step
from batchgen_lite.sampling_params import SamplingParams

COST = SweepCost(
    streamed_bytes=1e8, routed_bytes=9e8, bytes_per_second=1e9, seconds_per_token=1e-5, experts=8, choice=0.25
)
SHAPE = Shape(layers=2, hidden=192, heads=4, kv_heads=2, head_dim=48, experts=16, top_k=2, width=192, vocab=431)
FIRST = EACH = 3
LENGTHS = (60, 130, 5, 300, 64, 20, 90, 200) * 2
STREAMING: dict[str, Any] = {"kv_pages": 60, "resident_bytes": 200_000, "ring_bytes": 1 << 20, "token_budget": 256}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    write_checkpoint(path, SHAPE)
    return write_directory(path, train_byte_level())


@pytest.fixture(scope="module", autouse=True)
def _rows_end_one_by_one() -> Iterator[None]:
    """Row i may generate, and generates, FIRST + EACH i tokens."""

    def size(self: Prompts, index: int) -> RequestSize:
        return RequestSize(len(self.prompts[index]), FIRST + EACH * index)

    def open_(self: Prompts, index: int) -> tuple[SequenceRequest, Collecting]:
        params = SamplingParams(temperature=0.0, max_tokens=FIRST + EACH * index)
        request = SequenceRequest(index, self.prompts[index], params, seed=7)
        return request, Collecting(self.tokens[index], self.ended, self.errors, index)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Prompts, "size", size)
        patch.setattr(Prompts, "open", open_)
        yield


def run(model: Path, **options: Any) -> Result:
    return run_engine(model, random_prompts(LENGTHS), 1, keep_logits=True, threads=1, **STREAMING | options)


@pytest.fixture(scope="module")
def usual(model: Path) -> Result:
    return run(model, fixed_division=True)


# -- on paper -----------------------------------------------------------------------------------------------------


def test_more_in_memory_is_first_what_every_sweep_needs() -> None:
    some, most, all_ = keeping(COST, 4e7), keeping(COST, 3e8), keeping(COST, 1e12)
    assert (some.streamed_bytes, some.routed_bytes, some.resident_bytes) == pytest.approx((6e7, 9e8, 4e7))
    assert (most.streamed_bytes, most.routed_bytes, most.resident_bytes) == pytest.approx((0, 7e8, 3e8))
    assert (all_.streamed_bytes, all_.routed_bytes, all_.resident_bytes) == (0, 0, 1e9)


def test_a_step_is_a_tenth_of_a_small_pool_and_64_mib_of_a_large_one() -> None:
    assert least_step(100, 1000) == 10
    assert least_step(10_000, 1 << 20) == 64
    assert least_step(3, 1 << 30) == 1


Steps = list[tuple[int, int]]


def drive(rows: Seq[SimulatedRow], limits: Limits, page_bytes: float) -> tuple[SimulatedRunner, Steps, Steps]:
    """A run whose every step is looked at: pages before, and pages needed; those that were taken, and all offered."""
    clock, steps, offered = VirtualClock(), Steps(), Steps()
    runner = SimulatedRunner(limits, COST, clock)

    class Watching(SimulatedTail):
        async def keep_pages(self, pages: int, tables: Seq[BlockTable]) -> None:
            assert len(work._waiting) == 0
            assert not work._paused.current()
            before = self.runner.allocator.capacity
            offered.append((before, pages))
            await super().keep_pages(pages, tables)
            if self.runner.allocator.capacity < before:
                steps.append((before, pages))
            held = [page for table in tables for page in table.pages]
            assert len(set(held)) == len(held) == self.runner.allocator.capacity - self.runner.allocator.free
            assert all(self.runner.allocator.references(page) == 1 for page in held)

    work = Run(SimulatedSource(rows), runner, clock, tail=Watching(runner, page_bytes))
    asyncio.run(work.drive())
    assert work.statistics.rows_done == len(rows)
    assert runner.allocator.free == runner.allocator.capacity
    return runner, steps, offered


@pytest.mark.parametrize("seed", range(12))
def test_random_jobs_shrink_their_pool_and_never_run_short_of_it(seed: int) -> None:
    rng = random.Random(seed)
    rows = []
    for _ in range(rng.randint(2, 120)):
        most = rng.randint(1, 300)
        rows.append(SimulatedRow(rng.randint(1, 400), rng.randint(1, most), most))
    largest = max(pages_for(row.prompt + row.max_tokens) for row in rows)
    limits = Limits(rng.randint(32, 600), rng.randint(1, 32), 2 * largest + rng.randint(0, 40))
    runner, steps, offered = drive(rows, limits, page_bytes=1e6)
    least = least_step(limits.capacity_pages, 1e6)
    assert steps == [(before, kept) for before, kept in offered if before - kept >= least]
    assert len(steps) > 1 or seed == 0  # whose last rows end all at once
    fixed, _ = asyncio.run(simulate(rows, limits, COST))
    assert fixed.sweeps == len(runner.times)  # nobody was taken out for it, or waited
    if steps:
        assert fixed.ended is not None
        assert runner.clock.now() < fixed.ended


def test_a_forecast_knows_the_tail() -> None:
    model, rows = paper_model(), [RequestSize(100, 16 + 4 * index) for index in range(64)]
    assert model.work is not None
    plan = plan_memory(model, JobSize.of(rows), 900 * MIB, PROCESS, Overrides(), DISK_BOUND)
    cost = sweep_cost(model.work, DISK_BOUND, plan.resident_bytes)
    fixed = forecast(rows, None, plan, cost, model.work.group)
    adapting = forecast(rows, None, plan, cost, model.work.group, page_bytes=model.page)
    assert adapting.sweeps == fixed.sweeps
    assert adapting.bytes_read < fixed.bytes_read
    assert adapting.seconds < fixed.seconds


# -- for real -----------------------------------------------------------------------------------------------------


def test_a_run_reads_less_and_gives_the_same_bits(model: Path, usual: Result) -> None:
    got = run(model)
    assert_same_bits(usual, got)
    assert got.summary.sweeps == usual.summary.sweeps
    assert got.summary.bytes_read < 0.95 * usual.summary.bytes_read
    late = got.summary.measured["late_resident_bytes"]
    assert late is not None
    assert 0.5 * dict(got.plan.accounts)["KV cache"] < late < dict(got.plan.accounts)["KV cache"]
    assert "of weights stayed in memory" in got.summary.extra["tail"]
    assert usual.summary.measured["late_resident_bytes"] == 0
    assert "tail" not in usual.summary.extra


@pytest.mark.parametrize("kv_dtype", ["int8", "float32"])
def test_other_caches_shrink_too(kv_dtype: str, model: Path) -> None:
    fixed, got = run(model, kv_dtype=kv_dtype, fixed_division=True), run(model, kv_dtype=kv_dtype)
    assert_same_bits(fixed, got)
    assert got.summary.measured["late_resident_bytes"]


def test_a_device_of_its_own_keeps_its_division(model: Path) -> None:
    got = run(model, device="sim", device_resident_bytes=0, device_ring_bytes=1 << 20)
    assert got.summary.measured["late_resident_bytes"] == 0


def test_rows_that_were_held_or_evicted_come_back_before_the_pool_shrinks(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "FIRST", 70)  # more than is reserved at once: some run short
    fixed = run(model, fixed_division=True)
    taken_out = cycle((Tier.DISK, None))

    def choose(self: MigrationChoice, positions: int, free: dict[Tier, int], *_: Any) -> Tier | None:
        return next(taken_out)

    monkeypatch.setattr(MigrationChoice, "choose", choose)
    got = run(model, kv_pages=20, spill=SpillOptions(tmp_path))
    assert_same_bits(fixed, got)
    assert not got.summary.extra["KV spill"].startswith("0 pauses")
    assert ", 0 evictions" not in got.summary.extra["batch"]
    assert got.summary.measured["late_resident_bytes"]


def test_where_the_system_refuses_the_memory_the_run_goes_on(
    model: Path, usual: Result, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep, times = HostTier.keep, []

    def refuse(self: HostTier, tiles: Any) -> None:
        times.append(1)
        if len(times) > 1:  # the first is the plan's own
            raise BudgetError("no")
        keep(self, tiles)

    monkeypatch.setattr(HostTier, "keep", refuse)
    got = run(model)
    assert_same_bits(usual, got)
    assert len(times) == 2
    assert got.summary.measured["late_resident_bytes"] == 0


def test_the_books_hold_at_every_step_and_the_next_job_begins_as_planned(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[int] = []
    step = PoolToWeights.step

    def watched(self: PoolToWeights, *arguments: Any) -> int:
        nbytes = step(self, *arguments)
        held.append(arguments[-1].held)
        return nbytes

    monkeypatch.setattr(PoolToWeights, "step", watched)
    engine: LocalEngine = build_engine(model, EngineOptions(threads=1, overrides=Overrides(**STREAMING)))
    try:
        prompts, tokens, read = random_prompts(LENGTHS), [], []
        for _ in range(2):
            source = Prompts(prompts, SamplingParams(temperature=0.0))
            planned = sum(nbytes for _, nbytes in engine.plan(source).accounts)
            held.clear()
            summary = asyncio.run(engine.run(source))
            assert len(held) > 2
            assert max(held) <= planned
            assert source.errors == {}
            tokens.append(source.tokens)
            read.append(summary.bytes_read)
        assert tokens[0] == tokens[1]
        # The residents of the plan are still there the second time.
        assert read[0] - 200_000 - MIB < read[1] <= read[0]
    finally:
        engine.close()


def test_a_run_that_is_stopped_in_its_tail_goes_on_to_the_same_tokens(
    model: Path, usual: Result, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine: LocalEngine = build_engine(model, EngineOptions(threads=1, overrides=Overrides(**STREAMING)))
    step, steps = PoolToWeights.step, []

    def stop_at_the_second(self: PoolToWeights, *arguments: Any) -> int:
        steps.append(step(self, *arguments))
        if len(steps) == 2:
            engine.request_stop()
        return steps[-1]

    monkeypatch.setattr(PoolToWeights, "step", stop_at_the_second)
    try:
        first = Prompts(random_prompts(LENGTHS), SamplingParams(temperature=0.0))
        assert asyncio.run(engine.run(first)).stopped_early
        left = [index for index in range(len(LENGTHS)) if index not in first.ended]
        assert 1 < len(left) < len(LENGTHS)

        class Rest(Prompts):
            def size(self, at: int) -> RequestSize:
                return first.size(left[at])

            def open(self, at: int) -> tuple[SequenceRequest, Collecting]:
                request, _ = first.open(left[at])
                prior = tuple(first.tokens[left[at]])
                return replace(request, prior_ids=prior), Collecting(self.tokens[at], self.ended, self.errors, at)

        rest = Rest([first.prompts[index] for index in left], first.params)
        asyncio.run(engine.run(rest))
        assert rest.errors == first.errors == {}
    finally:
        engine.close()
    for at, index in enumerate(left):
        assert first.tokens[index] + rest.tokens[at] == usual.tokens[index], index


def test_seen_from_outside_the_process_stays_within_its_budget(tmp_path: Path) -> None:
    """A pool of some 100 MiB, all of it written to, becomes weights: more than what is never used of a budget, so that
    the process would exceed it if both were there at once."""
    path = tmp_path / "model"
    write_checkpoint(
        path, Shape(layers=24, hidden=256, heads=8, kv_heads=8, head_dim=64, experts=4, top_k=2, width=1024, vocab=431)
    )
    write_directory(path, train_byte_level())
    rows = random_prompts([110] * 32)
    lines = [
        {"token_ids": ids, "max_tokens": 20 if index % 16 == 0 else 2, "ignore_eos": True}
        for index, ids in enumerate(rows)
    ]
    prompts = write_lines(tmp_path / "prompts.jsonl", *lines)
    flags = ["--model", str(path), "--input", str(prompts), "--threads", "1"]

    def outside(*arguments: str, ram: int) -> tuple[Watched, str]:
        with open(tmp_path / "said", "w+b") as said:
            seen = watch(command(*arguments, *flags, "--ram", str(ram)), stdout=said, stderr=said)
            said.seek(0)
            return seen, said.read().decode()

    _, said = outside("plan", ram=MIB)
    ram = int(said.split("at least ")[1].split("MiB")[0]) * MIB + 128 * MIB
    output = tmp_path / "out.jsonl"
    seen, said = outside("generate", "--output", str(output), "--progress", "json", ram=ram)
    assert seen.code == 0, said
    assert len(read_records(output)) == len(rows)
    summary = next(line for line in map(json.loads, said.splitlines()[::-1]) if "late_resident_bytes" in line)
    assert summary["late_resident_bytes"] > 48 * MIB
    assert seen.peak_rss <= ram, f"{seen.peak_rss / MIB:.0f} MiB of {ram / MIB:.0f}"
