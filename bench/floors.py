"""What a comparison is to show at least, and whether it did: printed below the tables, never asserted in a test.

Floors are for this project's own checkpoint and jobs; another model or machine may well miss one and be in order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from compare_table import OURS, Result

AGAINST = {
    ("accelerate", "ram"): 9.6,
    ("accelerate", "ram+disk"): 9.6,
    ("llama.cpp", "ram"): 1.5,
    ("llama.cpp", "ram+disk"): 1.1,
    ("llama.cpp", "resident"): 1.2,
}
"""How many times as fast the job `chat` is to be, by rival and regime."""
OF_BARE_LOOP = 0.85
"""Of a bare loop of reading and computing, in the steady state (roofline.py)."""
OF_ROOFLINE = 0.85
"""Of the roofline by the run's own events, where the disk is limited; of the whole job, OF_WHOLE."""
OF_WHOLE = 0.70
BETWEEN_SWEEPS = 0.03
"""Of a run's time, at most: scheduling, text, journal."""
SCHEDULING = 20.0
"""Microseconds per sequence and sweep with 10,000 sequences, at most."""


@dataclass(frozen=True, slots=True)
class Floor:
    """One demand. ``least`` and ``measured`` are times as fast or shares; ``most``: a ceiling instead of a floor."""

    what: str
    least: float
    measured: float
    most: bool = False
    extrapolated: bool = False

    @property
    def held(self) -> bool:
        """Whether the demand is met."""
        return self.measured <= self.least if self.most else self.measured >= self.least


def floors_of(results: Sequence[Result], scheduling_seconds: float | None = None) -> Iterator[Floor]:
    """Every demand that these results, and the seconds that scheduling takes per sequence and sweep, speak of."""
    if scheduling_seconds is not None:
        what = "us of scheduling per sequence and sweep, 10,000 live"
        yield Floor(what, SCHEDULING, scheduling_seconds * 1e6, most=True)
    for ours in results:
        if ours.engine != OURS or ours.failed:
            continue
        where = f"{ours.workload}, {ours.regime}"
        for rival in results:
            least = AGAINST.get((rival.engine, rival.regime))
            same = (rival.workload, rival.regime) == (ours.workload, ours.regime)
            if least is not None and same and ours.workload == "chat" and not rival.failed:
                ratio = rival.bct_seconds / ours.bct_seconds
                yield Floor(f"{where}: times as fast as {rival.engine}", least, ratio, extrapolated=rival.extrapolated)
        yield from _own_floors(where, ours)


def _own_floors(where: str, ours: Result) -> Iterator[Floor]:
    bare, roofline = _figure(ours, "bare_loop_share"), _figure(ours, "roofline_share")
    if bare is not None:
        yield Floor(f"{where}: of the bare loop, steady state", OF_BARE_LOOP, bare)
    if roofline is not None:
        least = OF_WHOLE if ours.read_rate is None else OF_ROOFLINE
        yield Floor(f"{where}: of the roofline by its own events, tail included", least, roofline)
    if ours.read_rate is not None and ours.bound_seconds is not None:
        whole = ours.bound_seconds / ours.bct_seconds
        yield Floor(f"{where}: of the whole job's bound (job_bound.py)", OF_WHOLE, whole)
    between, seconds = _figure(ours, "between_sweeps_seconds"), _figure(ours, "run_seconds")
    if between is not None and seconds:
        yield Floor(f"{where}: share of time between sweeps", BETWEEN_SWEEPS, between / seconds, most=True)


def _figure(result: Result, name: str) -> float | None:
    value = result.extra.get(name)
    return float(value) if isinstance(value, int | float) else None


def floors_table(results: Sequence[Result], scheduling_seconds: float | None = None) -> str:
    """A Markdown table of all demands, or nothing where there are none."""
    lines = []
    for floor in floors_of(results, scheduling_seconds):
        asked = f"{'at most' if floor.most else 'at least'} {floor.least:g}"
        mark = "~" if floor.extrapolated else ""
        measured = f"{mark}{floor.measured:.3f}" if floor.most else f"{mark}{floor.measured:.2f}"
        lines.append(f"| {floor.what} | {asked} | {measured} | {'yes' if floor.held else 'NO'} |")
    if not lines:
        return ""
    return "\n".join(["### What it was to show", "", "| | asked | measured | held |", "|---|---|---|---|", *lines, ""])
