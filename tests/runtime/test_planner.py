"""How memory is divided, over random models, jobs, budgets and rates."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from planned_models import COMPUTE_BOUND, DISK_BOUND, GIB, MIB, PROCESS, paper_model

from batchgen_lite.errors import BudgetError
from batchgen_lite.offload.pages import pages_for
from batchgen_lite.runtime.interface import RequestSize
from batchgen_lite.runtime.planner import JobSize, MemoryPlan, ModelSize, Overrides, plan_candidates, plan_memory
from batchgen_lite.runtime.rates import MachineRates

NO_WISH = Overrides()

models = st.builds(
    paper_model,
    st.integers(20 * MIB, 60 * GIB),
    layers=st.integers(1, 80),
    experts=st.integers(8, 256),
)
jobs = st.builds(
    JobSize.of,
    st.lists(st.builds(RequestSize, st.integers(1, 5000), st.integers(1, 2000)), min_size=1, max_size=50),
)
rates = st.one_of(
    st.none(),
    st.builds(
        MachineRates,
        read_rate=st.floats(1e8, 1e10),
        flops=st.floats(1e9, 1e13),
        threads=st.integers(1, 16),
        source=st.just("measured"),
    ),
)


def plan(model: ModelSize, job: JobSize, ram: int, known: MachineRates | None = None) -> MemoryPlan:
    return plan_memory(model, job, ram, PROCESS, NO_WISH, known)


def smallest_budget(model: ModelSize, job: JobSize, known: MachineRates | None) -> int:
    with pytest.raises(BudgetError) as caught:
        plan(model, job, PROCESS, known)
    assert caught.value.smallest is not None
    return caught.value.smallest


@given(models, jobs, rates, st.integers(0, 64 * GIB))
def test_everything_planned_stays_within_the_budget(
    model: ModelSize, job: JobSize, known: MachineRates | None, more: int
) -> None:
    ram = smallest_budget(model, job, known) + more
    planned = plan(model, job, ram, known)
    assert all(nbytes >= 0 for _, nbytes in planned.accounts)
    assert sum(nbytes for _, nbytes in planned.accounts) <= ram


@given(models, jobs, rates)
def test_the_smallest_budget_works_in_a_process_that_is_a_little_larger_too_and_less_does_not(
    model: ModelSize, job: JobSize, known: MachineRates | None
) -> None:
    smallest = smallest_budget(model, job, known)
    assert smallest % MIB == 0
    plan(model, job, smallest, known)
    plan_memory(model, job, smallest, PROCESS + MIB, NO_WISH, known)  # from start to start it differs by less
    with pytest.raises(BudgetError, match=f"at least {smallest // MIB}MiB are needed"):
        plan(model, job, smallest - 2 * MIB, known)


@given(models, jobs, rates, st.integers(0, 64 * GIB))
def test_a_plan_can_run_its_longest_row_and_load_its_largest_tile(
    model: ModelSize, job: JobSize, known: MachineRates | None, more: int
) -> None:
    planned = plan(model, job, smallest_budget(model, job, known) + more, known)
    assert planned.kv_pages >= pages_for((job.usual_prompt or job.longest_prompt) + 1)
    if more >= pages_for(job.longest_prompt + 1) * model.page:
        assert planned.kv_pages >= pages_for(job.longest_prompt + 1)
    assert 1 <= planned.max_sequences <= planned.token_budget
    assert planned.slice_tokens <= planned.token_budget
    if planned.all_resident:
        assert planned.resident_bytes == model.tiles
        assert planned.embedding_resident
    else:
        assert planned.ring_bytes >= 2 * model.largest_load
    assert planned.workspace_bytes >= model.activations.workspace_bytes(planned.token_budget, planned.max_sequences)


@given(models, jobs, rates, st.integers(0, 16 * GIB))
def test_plans_are_pure(model: ModelSize, job: JobSize, known: MachineRates | None, more: int) -> None:
    ram = smallest_budget(model, job, known) + more
    assert plan(model, job, ram, known) == plan(model, job, ram, known)


@given(st.data(), models, jobs, st.integers(64 * MIB, 8 * GIB))
def test_wishes_are_kept(data: st.DataObject, model: ModelSize, job: JobSize, more: int) -> None:
    wish = Overrides(
        token_budget=data.draw(st.sampled_from([None, 16, 64, 512])),
        kv_pages=data.draw(st.one_of(st.none(), st.integers(pages_for(job.longest_prompt + 1), 200))),
        resident_bytes=data.draw(st.one_of(st.none(), st.integers(0, 64 * MIB))),
    )
    assume(wish.resident_bytes is None or wish.resident_bytes <= model.tiles)
    with pytest.raises(BudgetError) as caught:
        plan_memory(model, job, PROCESS, PROCESS, wish)
    assert caught.value.smallest is not None
    ram = caught.value.smallest + more
    planned = plan_memory(model, job, ram, PROCESS, wish)
    assert sum(nbytes for _, nbytes in planned.accounts) <= ram
    assert wish.token_budget in (None, planned.token_budget)
    assert wish.resident_bytes in (None, planned.resident_bytes)


def job(rows: int = 512, prompt: int = 72, new: int = 32) -> JobSize:
    return JobSize.of([RequestSize(prompt, new)] * rows)


def test_a_few_prompts_that_are_too_long_do_not_refuse_the_job() -> None:
    model = paper_model()
    small = [RequestSize(70, 32)] * 40
    budget = smallest_budget(model, JobSize.of(small), None)
    for long_rows in (1, 4):
        job = JobSize.of([*small, *[RequestSize(100_000, 32)] * long_rows])
        planned = plan(model, job, budget + 20 * model.page)
        assert pages_for(71) + 10 <= planned.kv_pages < pages_for(100_000)
        assert smallest_budget(model, job, None) == budget
    many = JobSize.of([*small, *[RequestSize(100_000, 32)] * 10])
    with pytest.raises(BudgetError, match=r"the longest prompt's KV cache \d+MiB"):
        plan(model, many, budget + 20 * model.page)
    alone = JobSize.of([RequestSize(100_000, 32)])
    with pytest.raises(BudgetError, match="the longest prompt's"):
        plan(model, alone, budget + 20 * model.page)
    with pytest.raises(BudgetError, match="the longest usual prompt's"):
        plan(model, JobSize.of([*small, RequestSize(100_000, 32)]), budget - 2 * MIB)
    roomy = plan(model, JobSize.of([*small, RequestSize(100_000, 32)]), budget + pages_for(100_032) * model.page)
    assert roomy.kv_pages >= pages_for(100_001)


def test_without_rates_memory_goes_to_kv_first_then_to_residents() -> None:
    model = paper_model()
    wanted = job().pages * model.page
    tight = plan(model, job(), PROCESS + 700 * MIB)
    assert tight.kv_pages < job().pages
    assert tight.resident_bytes < 2 * model.page
    wide = plan(model, job(), PROCESS + wanted + GIB)
    assert wide.kv_pages == job().pages
    assert wide.resident_bytes > 256 * MIB


def test_a_model_that_fits_is_held_whole() -> None:
    planned = plan(paper_model(), job(), 6 * GIB)
    assert planned.all_resident
    assert planned.ring_bytes == 0
    assert planned.kv_pages == job().pages


@pytest.mark.parametrize("known", [None, DISK_BOUND, COMPUTE_BOUND])
def test_no_division_is_compared_with_one_that_holds_everything(known: MachineRates | None) -> None:
    """They would take as long by the cost model, and the choice among equals could fall on a smaller batch."""
    candidates = plan_candidates(paper_model(), job(), 20 * GIB, PROCESS, NO_WISH, known)
    assert {(planned.all_resident, planned.kv_pages) for planned in candidates} == {(True, job().pages)}


def test_what_is_left_beside_a_whole_model_holds_weights_in_fp32() -> None:
    model = dataclasses.replace(paper_model(4 * GIB), widened=8 * GIB)
    job = JobSize.of([RequestSize(100, 50)] * 64)
    enough = plan(model, job, 40 * GIB)
    assert enough.all_resident
    assert enough.widened_bytes == dict(enough.accounts)["widened weights"] == 8 * GIB
    without = sum(nbytes for name, nbytes in enough.accounts if name != "widened weights")
    assert plan(model, job, without + GIB).widened_bytes == GIB
    assert plan(model, job, without).widened_bytes == 0
    assert "widened weights" not in dict(plan(model, job, without).accounts)
    streamed = plan(model, job, 3 * GIB)
    assert (streamed.all_resident, streamed.widened_bytes) == (False, 0)


def test_where_computing_saturates_residents_come_before_more_kv() -> None:
    """With the cores as the bottleneck a larger batch hardly helps; the bytes are better spent on the tail."""
    model, work = paper_model(), job(rows=4096)
    ram = PROCESS + 3 * GIB
    blind, disk, compute = (plan(model, work, ram, known) for known in (None, DISK_BOUND, COMPUTE_BOUND))
    assert blind.resident_bytes < 256 * MIB
    assert compute.kv_pages < blind.kv_pages
    assert compute.resident_bytes > max(disk.resident_bytes, blind.resident_bytes)


def test_a_faster_disk_needs_fewer_tokens_to_hide_its_reading() -> None:
    model = dataclasses.replace(paper_model(), embedding=0)
    budgets = [
        plan(model, job(rows=4000), 3 * GIB, dataclasses.replace(DISK_BOUND, read_rate=read)).token_budget
        for read in (1e8, 4e9)
    ]
    assert budgets[0] >= budgets[1] >= 512


def test_the_message_says_what_to_do() -> None:
    with pytest.raises(
        BudgetError, match=r"--ram 300MiB is too small .* give --ram \d+MiB or more, or shorten"
    ) as caught:
        plan(paper_model(), job(), 300 * MIB)
    assert caught.value.exit_code == 4


def ring_at(read_rate: float, ram: int = 3 * GIB) -> int:
    """Bytes of the ring where the disk gives ``read_rate``, within ``ram``."""
    known = MachineRates(read_rate=read_rate, flops=90e9, threads=2, source="measured")
    return plan(paper_model(20 * GIB), job(), ram, known).ring_bytes


def test_a_ring_holds_a_fifth_of_a_second_of_reading() -> None:
    load = paper_model().largest_load
    assert ring_at(3e8) == 60_000_000
    assert ring_at(5e7) == 2 * load  # what the largest tiles need, however slow the disk is
    assert ring_at(4e9) == 12 * load
    unknown = plan(paper_model(20 * GIB), job(), 3 * GIB)
    assert unknown.ring_bytes == 12 * load


def test_a_ring_takes_no_more_than_a_tenth_of_a_small_budget() -> None:
    load = paper_model().largest_load
    smallest = smallest_budget(paper_model(20 * GIB), job(), None)
    assert ring_at(4e9, smallest + 10 * MIB) == 2 * load
    assert 2 * load < ring_at(4e9, smallest + 400 * MIB) < 12 * load


def test_what_a_slow_disks_ring_does_not_need_becomes_residents() -> None:
    wish = Overrides(token_budget=512, kv_pages=300)
    fast, slow = (
        plan_memory(
            paper_model(20 * GIB), job(), 3 * GIB, PROCESS, wish, MachineRates(rate, 90e9, 2, source="measured")
        )
        for rate in (4e9, 1e8)
    )
    assert slow.resident_bytes - fast.resident_bytes == fast.ring_bytes - slow.ring_bytes == 96 * MIB - 20_000_000
