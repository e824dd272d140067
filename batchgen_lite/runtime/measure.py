"""How well sweeps used the link and the cores, from the run's own events: nothing here is estimated.

A *period* is the time from one sweep's end to the next one's: the sweep, and what happens between the two. In it

    busy       the reader had a submission unfinished: the link was in use
    waited     the engine had no weights to compute with
    computing  the sweep less what it waited

A sweep is *IO-bound* when it waits for more than IO_BOUND of its time. The link's idle share counts the periods of
those sweeps only: while the cores are the bottleneck the link may well idle.

The share of the roofline is sum(max(busy, computing)) / sum(period). No schedule can be faster than its slower
resource alone, at the rates at which both really worked in this run; what is missing from 1 is time in which neither
was at work, or in which they took turns. It says nothing on whether the disk or the cores could have been faster by
themselves: bench/roofline.py measures that.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from batchgen_lite.offload.pages import PageAllocator
from batchgen_lite.offload.readers.protocol import ReaderStatistics
from batchgen_lite.runtime.clock import Clock
from batchgen_lite.runtime.interface import SampledToken
from batchgen_lite.runtime.scheduler import Limits
from batchgen_lite.runtime.work import PageChanges, SweepRunner, Work
from batchgen_lite.trace.recorder import SILENT, Recorder

IO_BOUND = 0.25  # of a sweep's time spent waiting, from which the disk is what bounds it


@dataclass(slots=True)
class Shares:
    """Sums over the committed sweeps of one run, in seconds and bytes; ``io_...`` over the IO-bound ones alone."""

    sweeps: int = 0
    seconds: float = 0.0
    computing: float = 0.0
    waited: float = 0.0
    between: float = 0.0
    busy: float = 0.0
    nbytes: int = 0
    roofline: float = 0.0
    io_sweeps: int = 0
    io_seconds: float = 0.0
    io_busy: float = 0.0

    def observe(self, period: float, sweep: float, waited: float, busy: float, nbytes: int) -> None:
        """One period of ``period`` seconds, ``sweep`` of them in the sweep."""
        waited, busy = min(waited, sweep), min(busy, period)
        computing = sweep - waited
        self.sweeps += 1
        self.seconds += period
        self.computing += computing
        self.waited += waited
        self.between += period - sweep
        self.busy += busy
        self.nbytes += nbytes
        self.roofline += max(busy, computing)
        if waited > IO_BOUND * sweep:
            self.io_sweeps += 1
            self.io_seconds += period
            self.io_busy += busy

    @property
    def stream_rate(self) -> float:
        """Bytes/s while the link was busy."""
        return self.nbytes / self.busy if self.busy > 0 else 0.0

    @property
    def link_idle(self) -> float | None:
        """Share of the IO-bound sweeps' time in which nothing was being read; None without such sweeps."""
        return 1.0 - self.io_busy / self.io_seconds if self.io_seconds > 0 else None

    @property
    def roofline_share(self) -> float | None:
        """See the head of this file; None before the first sweep."""
        return self.roofline / self.seconds if self.seconds > 0 else None

    def figures(self) -> dict[str, float | int | None]:
        """For machines: part of the JSON summary."""
        share = self.roofline_share
        return {
            "streaming_bytes_per_second": round(self.stream_rate),
            "link_busy_seconds": round(self.busy, 3),
            "io_bound_sweeps": self.io_sweeps,
            "link_idle_share": None if self.link_idle is None else round(self.link_idle, 4),
            "computing_seconds": round(self.computing, 3),
            "waiting_seconds": round(self.waited, 3),
            "between_sweeps_seconds": round(self.between, 3),
            "roofline_share": None if share is None else round(share, 4),
        }


class MeasuringRunner:
    """A SweepRunner that lets another one run and looks at its reader and its waiting before and behind each sweep.

    ``reader``: the reader's totals; ``waited``: the engine's seconds of waiting so far; ``resident``: bytes of the
    process, asked for only where a recorder keeps them.
    """

    def __init__(
        self,
        runner: SweepRunner,
        clock: Clock,
        reader: Callable[[], ReaderStatistics],
        waited: Callable[[], float],
        resident: Callable[[], int] = lambda: 0,
        recorder: Recorder = SILENT,
    ) -> None:
        self.allocator: PageAllocator = runner.allocator
        self.shares = Shares()
        self._runner = runner
        self._clock = clock
        self._reader = reader
        self._waited = waited
        self._resident = resident
        self._recorder = recorder
        self._last: tuple[float, ReaderStatistics] | None = None  # the end of the sweep before

    def limits(self) -> Limits:
        return self._runner.limits()

    async def run(self, work: Seq[Work], changes: PageChanges) -> list[SampledToken | None]:
        """See SweepRunner.run."""
        started, waited = self._clock.now(), self._waited()
        since, before = self._last or (started, self._reader())
        self._last = None
        sampled = await self._runner.run(work, changes)
        now, after = self._clock.now(), self._reader()
        self._last = now, after
        self.shares.observe(
            now - since,
            now - started,
            self._waited() - waited,
            after.busy_seconds - before.busy_seconds,
            after.bytes_read - before.bytes_read,
        )
        if self._recorder.active:
            self._recorder.memory(self._resident(), self.allocator.capacity - self.allocator.free)
        return sampled

    def abort(self) -> None:
        self._runner.abort()
