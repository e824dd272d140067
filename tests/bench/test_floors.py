"""What comparisons are to show: demands are taken from the right results, and a missed one is said."""

from __future__ import annotations

from compare_table import Result
from floors import floors_of, floors_table

FIGURES: dict[str, object] = {
    "roofline_share": 0.9,
    "between_sweeps_seconds": 1.0,
    "run_seconds": 50.0,
    "bare_loop_share": 0.8,
}


def result_of(engine: str, seconds: float, regime: str = "ram", workload: str = "chat", **changes: object) -> Result:
    return Result(engine, workload, regime, {}, seconds, 1, 1, **changes)  # type: ignore[arg-type]


def test_rivals_of_the_same_job_and_regime_count() -> None:
    results = [
        result_of("batchgen-lite", 10.0),
        result_of("accelerate", 95.0, extrapolated=True),
        result_of("llama.cpp", 15.0),
        result_of("llama.cpp", 500.0, regime="resident"),
        result_of("accelerate", 900.0, workload="prefill"),
    ]
    found = {floor.what: (floor.least, floor.measured, floor.held) for floor in floors_of(results)}
    assert found == {
        "chat, ram: times as fast as accelerate": (9.6, 9.5, False),
        "chat, ram: times as fast as llama.cpp": (1.5, 1.5, True),
    }
    lines = floors_table(results).splitlines()
    assert "| chat, ram: times as fast as accelerate | at least 9.6 | ~9.50 | NO |" in lines
    assert "| chat, ram: times as fast as llama.cpp | at least 1.5 | 1.50 | yes |" in lines


def test_our_own_figures_and_their_floors() -> None:
    limited = result_of("batchgen-lite", 100.0, "ram+disk", read_rate=200, bound_seconds=75.0, extra=FIGURES)
    found = {floor.what.split(": ")[1]: (floor.least, floor.measured, floor.held) for floor in floors_of([limited])}
    assert found == {
        "of the bare loop, steady state": (0.85, 0.8, False),
        "of the roofline by its own events, tail included": (0.85, 0.9, True),
        "of the whole job's bound (job_bound.py)": (0.7, 0.75, True),
        "share of time between sweeps": (0.03, 0.02, True),
    }
    (scheduling,) = floors_of([], 21e-6)
    assert (scheduling.least, scheduling.measured, scheduling.held) == (20.0, 21.0, False)
    free = result_of("batchgen-lite", 100.0, extra={"roofline_share": 0.69})
    (floor,) = floors_of([free])
    assert (floor.least, floor.held) == (0.7, False)


def test_failed_runs_say_nothing() -> None:
    assert floors_table([result_of("batchgen-lite", 1.0, failed="killed", extra=FIGURES)]) == ""
    results = [result_of("batchgen-lite", 1.0), result_of("accelerate", 1.0, failed="killed: out of memory")]
    assert floors_table(results) == ""
