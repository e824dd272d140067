"""Continuous batching over a fixed number of slots: prompts are cut into chunks that share steps with decoding rows.

What a skilled user of llama.cpp would write around it. Free slots take the next prompt at once; a step holds one token
of every decoding row and fills up with prompt tokens to its budget. Pure, so the steps of a whole job can be counted
beforehand; the driver runs the very same schedule.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rivals.job_steps import Prompt, Step


@dataclass
class Slot:
    """A row in flight: ``row`` indexes the job, ``sequence`` the engine's cache."""

    sequence: int
    row: int
    prompt_length: int
    to_generate: int
    prefilled: int = 0
    generated: int = 0


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens ``start`` to ``stop`` of a row's sequence, given to the engine in one step. ``samples``: the last one's
    logits are wanted. ``ends``: the row is done with the token that is sampled then."""

    sequence: int
    row: int
    start: int
    stop: int
    samples: bool
    ends: bool


def refill_steps(prompts: Sequence[Prompt], slots: int, budget: int) -> Iterator[list[Span]]:
    """The spans of every step of the job, in order. ``budget`` is the largest number of tokens in a step."""
    if budget < slots:
        raise ValueError(f"a budget of {budget} tokens a step is below the {slots} rows that decode in it")
    waiting = list(range(len(prompts)))[::-1]
    free = list(range(slots))[::-1]
    live: list[Slot] = []
    while waiting or live:
        while waiting and free:
            row = waiting.pop()
            live.append(Slot(free.pop(), row, len(prompts[row].ids), prompts[row].new_tokens))
        spans = plan_step(live, budget)
        yield spans
        ended = {span.sequence for span in spans if span.ends}
        free.extend(sorted(ended, reverse=True))
        live = [slot for slot in live if slot.sequence not in ended]


def plan_step(live: list[Slot], budget: int) -> list[Span]:
    """One step: decoding rows first, then prompts in order of arrival up to the budget; slots move on."""
    spans = []
    for slot in live:
        if slot.prefilled == slot.prompt_length:
            position = slot.prompt_length + slot.generated - 1
            slot.generated += 1
            ends = slot.generated == slot.to_generate
            spans.append(Span(slot.sequence, slot.row, position, position + 1, True, ends))
    room = budget - len(spans)
    for slot in live:
        take = min(room, slot.prompt_length - slot.prefilled)
        if take > 0:
            start, slot.prefilled = slot.prefilled, slot.prefilled + take
            samples = slot.prefilled == slot.prompt_length
            slot.generated += samples
            spans.append(
                Span(slot.sequence, slot.row, start, slot.prefilled, samples, samples and slot.to_generate == 1)
            )
            room -= take
    return spans


def step_of(spans: Sequence[Span], prompts: Sequence[Prompt]) -> Step:
    """How many prompt tokens and decoding rows a step holds."""
    prompt_tokens = sum(span.stop - span.start for span in spans if span.start < len(prompts[span.row].ids))
    rows = sum(span.start >= len(prompts[span.row].ids) for span in spans)
    return Step(prompt_tokens, rows)
