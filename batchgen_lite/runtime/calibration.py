"""The cost model, corrected by the run's own sweeps. It serves the time left and never a bit of a result."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq

from batchgen_lite.offload.pages import PageAllocator
from batchgen_lite.runtime.clock import Clock
from batchgen_lite.runtime.cost import SweepCost, SweepLoad
from batchgen_lite.runtime.interface import SampledToken
from batchgen_lite.runtime.scheduler import Limits
from batchgen_lite.runtime.work import PageChanges, SweepRunner, Work, load_of

KEEP = 0.9  # of the older sweeps' weight after each new one: about the last ten count


class Calibration:
    """Compares what sweeps computed with what the model says they should have."""

    def __init__(self, cost: SweepCost) -> None:
        self.base = cost
        self._predicted = 0.0
        self._measured = 0.0
        self.sweeps = 0

    def observe(self, load: SweepLoad, seconds: float, waited: float) -> None:
        """A sweep of ``load`` took ``seconds``, for ``waited`` of which the cores had no weights."""
        self._predicted = KEEP * self._predicted + self.base.busy(load)
        self._measured = KEEP * self._measured + max(0.0, seconds - waited - self.base.fixed_seconds)
        self.sweeps += 1

    @property
    def compute_factor(self) -> float:
        """How many times as long as predicted computing takes; 1 before anything is known."""
        return self._measured / self._predicted if self._predicted > 0 and self._measured > 0 else 1.0

    def cost(self, read_rate: float = 0.0) -> SweepCost:
        """The model as corrected, with the reader's own rate in bytes/s where it is known."""
        return self.base.calibrated(self.compute_factor, read_rate or None)


class CalibratingRunner:
    """A SweepRunner that lets another one run and notes how long it took. ``waited``: its waiting seconds so far;
    ``group``: query heads that share a KV head."""

    def __init__(
        self, runner: SweepRunner, calibration: Calibration, clock: Clock, waited: Callable[[], float], group: int
    ) -> None:
        self.allocator: PageAllocator = runner.allocator
        self.calibration = calibration
        self._runner = runner
        self._clock = clock
        self._waited = waited
        self._group = group

    def limits(self) -> Limits:
        return self._runner.limits()

    async def run(self, work: Seq[Work], changes: PageChanges) -> list[SampledToken | None]:
        """See SweepRunner.run."""
        load = load_of(work, self._group)  # before the sweep: a sequence's length changes after it
        started, waited = self._clock.now(), self._waited()
        sampled = await self._runner.run(work, changes)
        self.calibration.observe(load, self._clock.now() - started, self._waited() - waited)
        return sampled

    def abort(self) -> None:
        self._runner.abort()
