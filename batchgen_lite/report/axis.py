"""Time for readers: intervals joined until they can be told apart, in a unit that suits the run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from batchgen_lite.trace.timeline import Timeline

MOST_BARS = 300


@dataclass(frozen=True, slots=True)
class TimeAxis:
    """``joined`` intervals of the timeline are one bar; ``starts`` in ``unit``, of ``unit_seconds`` each."""

    starts: list[float]
    width: float
    joined: int
    bar_seconds: float
    unit: str
    unit_seconds: float

    @classmethod
    def of(cls, line: Timeline) -> TimeAxis:
        joined = max(1, -(-line.used // MOST_BARS))
        unit, seconds = ("s", 1.0) if line.end < 600 else ("min", 60.0) if line.end < 4 * 3600 else ("h", 3600.0)
        bar = joined * line.width
        bars = -(-line.used // joined)
        return cls([at * bar / seconds for at in range(bars)], bar / seconds, joined, bar, unit, seconds)

    @property
    def title(self) -> str:
        return f"time ({self.unit})"

    def sums(self, amounts: Sequence[float]) -> list[float]:
        """Amounts of joined intervals."""
        return [sum(amounts[at : at + self.joined]) for at in range(0, len(amounts), self.joined)]

    def rates(self, amounts: Sequence[float]) -> list[float]:
        """Amounts per second; of seconds spent, the share of the time."""
        return [amount / self.bar_seconds for amount in self.sums(amounts)]

    def means(self, levels: Sequence[float]) -> list[float]:
        groups = (levels[at : at + self.joined] for at in range(0, len(levels), self.joined))
        return [sum(group) / len(group) for group in groups]

    def peaks(self, levels: Sequence[float]) -> list[float]:
        return [max(levels[at : at + self.joined]) for at in range(0, len(levels), self.joined)]
