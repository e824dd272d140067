"""How a run's events are held against its plan."""

from __future__ import annotations

from typing import Any

import pytest
from plan_accuracy import seconds_until, within

# A run that began at 1000 s and ended at 1040 s.
EVENTS: list[dict[str, Any]] = [
    {"event": "plan", "time": 990.0},
    {"event": "progress", "time": 1000.5, "tokens_decoded": 0},
    {"event": "progress", "time": 1010.0, "tokens_decoded": 0},
    {"event": "progress", "time": 1020.0, "tokens_decoded": 100},
    {"event": "progress", "time": 1022.0, "tokens_decoded": 100},
    {"event": "progress", "time": 1032.0, "tokens_decoded": 150},
    {"event": "summary", "time": 1040.0, "tokens_decoded": 160, "run_seconds": 40.0},
]


@pytest.mark.parametrize(("tokens", "seconds"), [(50, 15.0), (100, 20.0), (125, 27.0), (155, 36.0), (160, 40.0)])
def test_the_steady_part_ends_between_two_events(tokens: int, seconds: float) -> None:
    assert seconds_until(tokens, EVENTS) == pytest.approx(seconds)


def test_a_run_without_progress_events_is_even() -> None:
    assert seconds_until(40, EVENTS[-1:]) == pytest.approx(10.0)


def test_a_run_of_fewer_tokens_is_no_match() -> None:
    with pytest.raises(ValueError, match="160 tokens, fewer than the 161"):
        seconds_until(161, EVENTS)


@pytest.mark.parametrize(
    ("whole", "steady", "rates", "kernels", "good"),
    [
        (1.1, 0.9, "measured", "measured", True),
        (1.1, 0.79, "cached", "measured", False),
        (1.3, 1.0, "cached", "measured", False),
        (1.0, 1.0, "assumed", "measured", False),
        (1.0, 1.0, "cached", "expected", False),
    ],
)
def test_both_ratios_count_and_only_with_measured_rates(
    whole: float, steady: float, rates: str, kernels: str, good: bool
) -> None:
    ratios = {"measured_over_planned": whole, "steady_measured_over_planned": steady}
    result = {**ratios, "rates": rates, "kernels": kernels}
    assert within(result, 0.2) is good
