"""What a rival's driver reports: the steps it ran, and the whole job's time, measured or extrapolated by step count.

A driver runs the job step by step and may stop early, when a time limit is over and it has run enough steps of each
kind. The rest is then estimated: the steps that the whole job takes are known exactly, because lengths are fixed.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

ENOUGH_STEPS = 3  # of each kind, before a job may be extrapolated


@dataclass(frozen=True, slots=True)
class Prompt:
    """One row of the job: its token ids and how many tokens to generate."""

    ids: list[int]
    new_tokens: int


@dataclass(frozen=True, slots=True)
class Step:
    """One pass through the model: how many prompt tokens and how many decoding rows it held, padding included."""

    prompt_tokens: int
    rows: int
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """A rival's result. ``bct_seconds`` runs from the process's start to the last row done; loading is part of it."""

    engine: str
    settings: dict[str, object]
    bct_seconds: float
    extrapolated: bool
    load_seconds: float
    steps_run: int
    steps_total: int
    prompt_tokens: int
    new_tokens: int

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")


@dataclass
class StepLog:
    """The steps run so far, and whether it is time to stop."""

    seconds_allowed: float
    began: float = field(default_factory=time.monotonic)
    steps: list[Step] = field(default_factory=list)

    def add(self, prompt_tokens: int, rows: int, began: float) -> None:
        """Note a step that ``began`` at this reading of the monotonic clock and ends now."""
        self.steps.append(Step(prompt_tokens, rows, time.monotonic() - began))

    @property
    def over_time(self) -> bool:
        return time.monotonic() - self.began > self.seconds_allowed

    @property
    def enough(self) -> bool:
        """Whether each kind of step has been seen often enough to extrapolate from."""
        return min(len(of_kind(self.steps, True)), len(of_kind(self.steps, False))) >= ENOUGH_STEPS


def read_prompts(path: Path) -> list[Prompt]:
    """The job's rows, as bench/workloads.py writes them."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [Prompt(row["token_ids"], row["max_tokens"]) for row in rows]


def of_kind(steps: Sequence[Step], prefill: bool) -> list[Step]:
    """Steps that mostly prefill, or mostly decode; where rows are refilled nearly every step does a little of both."""
    return [step for step in steps if (step.prompt_tokens > step.rows) == prefill]


def estimate_seconds(planned: Sequence[Step], run: Sequence[Step], choice: float = 1.0) -> float:
    """Seconds of all planned steps, from those that were run.

    A decoding step counts by the share of weights that its rows touch, if each token chooses a share ``choice`` of the
    experts (1: a dense model); the last steps of a job carry few rows and cost less. Dense weights shrink along with
    it, which favours the rival. Steps that prefill differ widely in size, so they count by tokens; where weights are
    streamed that favours the rival, too (its time does not shrink with tokens)."""
    total = 0.0
    planned_decode, run_decode = of_kind(planned, False), of_kind(run, False)
    if planned_decode:
        whole = sum(step.seconds for step in run_decode) / sum(touched(step, choice) for step in run_decode)
        total += whole * sum(touched(step, choice) for step in planned_decode)
    planned_prefill, run_prefill = of_kind(planned, True), of_kind(run, True)
    if planned_prefill:
        per_token = sum(step.seconds for step in run_prefill) / sum(tokens(step) for step in run_prefill)
        total += per_token * sum(tokens(step) for step in planned_prefill)
    return total


def touched(step: Step, choice: float) -> float:
    return 1.0 if choice >= 1.0 else 1.0 - float((1.0 - choice) ** tokens(step))


def tokens(step: Step) -> int:
    return step.prompt_tokens + step.rows


def outcome_of(
    engine: str,
    settings: dict[str, object],
    prompts: Sequence[Prompt],
    planned: Sequence[Step],
    log: StepLog,
    load_seconds: float,
    choice: float = 1.0,
) -> Outcome:
    """The whole job's figures; extrapolated where not all planned steps were run."""
    complete = len(log.steps) >= len(planned)
    seconds = time.monotonic() - log.began if complete else estimate_seconds(planned, log.steps, choice)
    return Outcome(
        engine=engine,
        settings=settings,
        bct_seconds=load_seconds + seconds,
        extrapolated=not complete,
        load_seconds=load_seconds,
        steps_run=len(log.steps),
        steps_total=len(planned),
        prompt_tokens=sum(len(prompt.ids) for prompt in prompts),
        new_tokens=sum(prompt.new_tokens for prompt in prompts),
    )
