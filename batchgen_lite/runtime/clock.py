"""Time as the runtime sees it: real, or virtual so that schedules can be simulated exactly and without sleeping."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Seconds since some fixed moment; never goes back."""

    def now(self) -> float: ...


class MonotonicClock:
    """The machine's own clock."""

    def now(self) -> float:
        return time.monotonic()


class VirtualClock:
    """Stands still until it is told to advance."""

    def __init__(self) -> None:
        self._now = 0.0

    def now(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        """Let ``seconds`` >= 0 pass."""
        if seconds < 0:
            raise ValueError(f"time cannot go back by {-seconds} s")
        self._now += seconds
