"""Amounts over time in a fixed number of intervals, whose length doubles when the run outgrows them."""

from __future__ import annotations

INTERVALS = 2048
FIRST_SECONDS = 1 / 64  # 2048 intervals are then 32 s; a night of 9 h has intervals of 16 s


class Timeline:
    """Named channels over [0, ``INTERVALS`` x ``width``) seconds. Not thread-safe.

    ``flows`` add up (seconds spent, bytes moved); ``levels`` are sampled (rows running, bytes in use) and answer with
    the mean and the peak of the samples in an interval, or the last value before it.
    """

    def __init__(self, flows: tuple[str, ...], levels: tuple[str, ...], first_seconds: float = FIRST_SECONDS) -> None:
        self.width = first_seconds
        self.end = 0.0
        """Seconds up to which something has been noted."""
        self._flows = {name: [0.0] * INTERVALS for name in flows}
        self._sums = {name: [0.0] * INTERVALS for name in levels}
        self._counts = {name: [0.0] * INTERVALS for name in levels}
        self._peaks = {name: [0.0] * INTERVALS for name in levels}

    def add(self, name: str, start: float, end: float, amount: float) -> None:
        """Spread ``amount`` evenly over [start, end]."""
        start = max(0.0, start)
        end = max(start, end)
        self._reach(end)
        row, width = self._flows[name], self.width
        first, last = int(start / width), min(int(end / width), INTERVALS - 1)
        if first >= last:
            row[last] += amount
            return
        rate = amount / (end - start)
        row[first] += ((first + 1) * width - start) * rate
        for at in range(first + 1, last):
            row[at] += width * rate
        row[last] += (end - last * width) * rate

    def sample(self, name: str, at: float, value: float) -> None:
        """The level ``name`` is ``value`` at this moment."""
        at = max(0.0, at)
        self._reach(at)
        slot = min(int(at / self.width), INTERVALS - 1)
        self._sums[name][slot] += value
        self._counts[name][slot] += 1
        self._peaks[name][slot] = max(self._peaks[name][slot], value)

    def _reach(self, end: float) -> None:
        self.end = max(self.end, end)
        while end >= self.width * INTERVALS:
            for rows in (self._flows, self._sums, self._counts):
                for name, row in rows.items():
                    rows[name] = _halved([a + b for a, b in zip(row[::2], row[1::2], strict=True)])
            for name, row in self._peaks.items():
                self._peaks[name] = _halved([max(a, b) for a, b in zip(row[::2], row[1::2], strict=True)])
            self.width *= 2

    # -- what it has to tell --------------------------------------------------------------------------------------

    @property
    def used(self) -> int:
        """Intervals up to the last one that anything was noted in."""
        return min(INTERVALS, int(self.end / self.width) + 1)

    def starts(self) -> list[float]:
        """Where each interval begins, in seconds."""
        return [at * self.width for at in range(self.used)]

    def flow(self, name: str) -> list[float]:
        """The amounts, interval by interval."""
        return self._flows[name][: self.used]

    def total(self, name: str) -> float:
        return sum(self._flows[name])

    def level(self, name: str) -> list[float]:
        """Mean of the samples; where there are none, what it was before."""
        means, before = [], 0.0
        for total, count in zip(self._sums[name][: self.used], self._counts[name], strict=False):
            before = total / count if count else before
            means.append(before)
        return means

    def peaks(self, name: str) -> list[float]:
        """Highest sample; where there are none, the mean before."""
        means = self.level(name)
        return [max(peak, mean) for peak, mean in zip(self._peaks[name], means, strict=False)]


def _halved(pairs: list[float]) -> list[float]:
    return pairs + [0.0] * (INTERVALS - len(pairs))
