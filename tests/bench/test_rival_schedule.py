"""The schedules and estimates of rivals' drivers: every token once, budgets kept, sums right."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rivals.job_steps import Prompt, Step, StepLog, estimate_seconds, outcome_of, read_prompts
from rivals.refill_schedule import Span, refill_steps, step_of
from workloads import WORKLOADS, rows_of, write_prompts

JOBS = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 12)), min_size=1, max_size=30)


def job(rows: list[tuple[int, int]]) -> list[Prompt]:
    return [Prompt(list(range(length)), new) for length, new in rows]


@given(JOBS, st.integers(1, 8), st.integers(0, 30))
def test_every_token_is_given_once_in_order(rows: list[tuple[int, int]], slots: int, extra: int) -> None:
    prompts = job(rows)
    spans: dict[int, list[Span]] = {}
    for step in refill_steps(prompts, slots, slots + extra):
        for span in step:
            spans.setdefault(span.row, []).append(span)
    assert set(spans) == set(range(len(prompts)))
    for row, prompt in enumerate(prompts):
        positions = [position for span in spans[row] for position in range(span.start, span.stop)]
        # The last token that is generated is never given back.
        assert positions == list(range(len(prompt.ids) + prompt.new_tokens - 1))
        assert sum(span.samples for span in spans[row]) == prompt.new_tokens
        assert [span.ends for span in spans[row]] == [False] * (len(spans[row]) - 1) + [True]
        assert len({span.sequence for span in spans[row]}) == 1


@given(JOBS, st.integers(1, 8), st.integers(0, 30))
def test_budget_and_sequences_are_kept(rows: list[tuple[int, int]], slots: int, extra: int) -> None:
    prompts = job(rows)
    owners: dict[int, int] = {}
    for step in refill_steps(prompts, slots, slots + extra):
        assert 0 < sum(span.stop - span.start for span in step) <= slots + extra
        sequences = [span.sequence for span in step]
        assert len(sequences) == len(set(sequences))
        assert all(0 <= sequence < slots for sequence in sequences)
        for span in step:
            assert owners.setdefault(span.sequence, span.row) == span.row
            if span.ends:
                del owners[span.sequence]
    assert not owners


@given(JOBS, st.integers(1, 8), st.integers(0, 30))
def test_steps_add_up_to_the_job(rows: list[tuple[int, int]], slots: int, extra: int) -> None:
    prompts = job(rows)
    steps = [step_of(spans, prompts) for spans in refill_steps(prompts, slots, slots + extra)]
    assert sum(step.prompt_tokens for step in steps) == sum(length for length, _ in rows)
    assert sum(step.rows for step in steps) == sum(new - 1 for _, new in rows)


def test_slots_are_refilled_at_once() -> None:
    prompts = job([(4, 1), (4, 9), (4, 9)])
    steps = list(refill_steps(prompts, slots=2, budget=8))
    assert {span.row for span in steps[0]} == {0, 1}
    assert {span.row for span in steps[1]} == {1, 2}


def test_a_budget_below_the_rows_is_refused() -> None:
    with pytest.raises(ValueError, match="budget of 3"):
        next(refill_steps(job([(1, 1)]), slots=4, budget=3))


def test_estimate_of_a_complete_run_is_its_time() -> None:
    run = [Step(100, 0, 2.0), Step(50, 0, 1.0), Step(0, 8, 0.5), Step(0, 8, 0.7)]
    assert estimate_seconds(run, run) == pytest.approx(4.2)


def test_estimate_counts_prefill_by_tokens_and_decoding_by_steps() -> None:
    run = [Step(100, 0, 2.0), Step(0, 8, 0.5), Step(0, 4, 0.7)]
    planned = [Step(100, 0), Step(300, 0), *[Step(0, 8)] * 10]
    assert estimate_seconds(planned, run) == pytest.approx(400 * 0.02 + 10 * 0.6)


def test_estimate_lets_steps_of_few_rows_cost_what_they_touch() -> None:
    run = [Step(0, 100, 2.0)]
    planned = [Step(0, 100), Step(0, 1), Step(0, 2)]
    assert estimate_seconds(planned, run, choice=0.125) == pytest.approx(2.0 * (1 + 0.125 + 0.234375), rel=1e-4)
    assert estimate_seconds(planned, run) == pytest.approx(6.0)


def test_estimate_needs_no_step_of_a_kind_that_is_not_planned() -> None:
    assert estimate_seconds([Step(10, 0)] * 2, [Step(10, 0, 1.0)]) == pytest.approx(2.0)
    assert estimate_seconds([Step(0, 5)] * 2, [Step(0, 5, 1.0)]) == pytest.approx(2.0)


def test_outcome_says_whether_it_was_extrapolated(tmp_path: Path) -> None:
    prompts = job([(5, 3), (6, 2)])
    planned = [step_of(spans, prompts) for spans in refill_steps(prompts, 2, 16)]
    log = StepLog(seconds_allowed=0.0)
    log.steps = [Step(step.prompt_tokens, step.rows, 1.0) for step in planned[:2]]
    part = outcome_of("rival", {"slots": 2}, prompts, planned, log, load_seconds=4.0)
    assert (part.extrapolated, part.steps_run, part.steps_total) == (True, 2, 3)
    assert part.bct_seconds == pytest.approx(4.0 + 3.0)
    assert (part.prompt_tokens, part.new_tokens) == (11, 5)
    log.steps.append(Step(0, 1, 1.0))
    whole = outcome_of("rival", {}, prompts, planned, log, load_seconds=4.0)
    assert not whole.extrapolated
    part.write(tmp_path / "outcome.json")
    assert json.loads((tmp_path / "outcome.json").read_text())["settings"] == {"slots": 2}


@pytest.mark.parametrize(("kinds", "enough"), [((3, 3), True), ((3, 2), False), ((0, 9), False)])
def test_enough_wants_several_steps_of_each_kind(kinds: tuple[int, int], enough: bool) -> None:
    log = StepLog(1.0)
    log.steps = [Step(9, 0)] * kinds[0] + [Step(0, 9)] * kinds[1]
    assert log.enough is enough


def test_prompts_are_read_as_workloads_write_them(tmp_path: Path) -> None:
    write_prompts(tmp_path / "job.jsonl", WORKLOADS["chat"], 1000)
    read = read_prompts(tmp_path / "job.jsonl")
    lengths = [(len(prompt.ids), prompt.new_tokens) for prompt in read]
    assert lengths == [(row.prompt_tokens, row.new_tokens) for row in rows_of(WORKLOADS["chat"])]
