"""What a part's bench gives: figures, each with a ratio to something measured beside it on the same machine.

Absolute figures belong to one machine and one moment. A ratio to a reference that does the same kind of work (plain
Python, a memory copy, a bare loop of reads) moves far less from machine to machine, and is what a stored baseline can
hold. All ratios are costs: twice as high is twice as slow. What one thread does is measured in its processor time, so
that a busy machine does not show in it, but for its caches.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Figure:
    """``value`` in ``unit``, for people; ``ratio``: cost in units of the part's reference."""

    name: str
    value: float
    unit: str
    ratio: float


def best(action: Callable[[], object], times: int) -> float:
    """This thread's processor seconds in the quickest of ``times`` calls: what else the machine does only ever adds."""
    seconds = float("inf")
    for _ in range(times):
        started = time.thread_time()
        action()
        seconds = min(seconds, time.thread_time() - started)
    return seconds


class _Item:
    __slots__ = ("count", "name")

    def __init__(self, name: int) -> None:
        self.name = name
        self.count = 0


def _python_work() -> None:
    table: dict[int, list[_Item]] = {}
    for number in range(10_000):
        item = _Item(number)
        item.count += number % 7
        table.setdefault(number % 64, []).append(item)
    sum(item.count for items in table.values() for item in items)


def python_unit() -> float:
    """Seconds for the reference of everything that is Python: an object made, changed and put into a dict of lists."""
    return best(_python_work, 5) / 10_000


def copy_rate() -> float:
    """Bytes/s of a copy in memory, 64 MiB at a time."""
    source = np.ones(64 << 20, np.uint8)
    target = np.empty_like(source)
    return len(source) / best(lambda: np.copyto(target, source), 5)


def show(figures: Sequence[Figure]) -> None:
    """A table on standard output."""
    width = max(map(len, (figure.name for figure in figures)), default=0)
    for figure in figures:
        print(f"{figure.name:<{width}}  {figure.value:>12,.2f} {figure.unit:<22} {figure.ratio:>10.2f} x reference")
