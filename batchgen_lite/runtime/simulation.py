"""A run on paper: the same scheduler, engine and coroutines, with sweeps that only take virtual time.

Schedules can so be tested exactly, and jobs forecast for machines that are not there. Torch-free.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from batchgen_lite.offload.pages import PageAllocator
from batchgen_lite.runtime.clock import VirtualClock
from batchgen_lite.runtime.engine import Run
from batchgen_lite.runtime.interface import Finish, RequestSize, SampledToken, SequenceRequest
from batchgen_lite.runtime.scheduler import Limits
from batchgen_lite.runtime.stats import RunStatistics
from batchgen_lite.runtime.work import PageChanges, SweepAborted, Work
from batchgen_lite.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class SweepCost:
    """What a sweep takes: reading its streamed weights overlaps with computing its tokens."""

    streamed_bytes: float
    bytes_per_second: float
    seconds_per_token: float
    fixed_seconds: float = 0.0

    def seconds(self, tokens: int) -> float:
        """max(reading, computing) of a sweep of ``tokens`` tokens."""
        reading = self.streamed_bytes / self.bytes_per_second if self.streamed_bytes else 0.0
        return self.fixed_seconds + max(reading, tokens * self.seconds_per_token)


@dataclass(slots=True)
class SimulatedRunner:
    """Implements SweepRunner: tokens are zeros, time passes on ``clock`` only."""

    limits_: Limits
    cost: SweepCost
    clock: VirtualClock
    allocator: PageAllocator = field(init=False)
    aborted: bool = False
    sweeps: list[list[tuple[int, int, int]]] = field(default_factory=list)  # (row, start, count) of every span

    def __post_init__(self) -> None:
        self.allocator = PageAllocator(self.limits_.capacity_pages)

    def limits(self) -> Limits:
        return self.limits_

    async def run(self, work: Seq[Work], changes: PageChanges) -> list[SampledToken | None]:
        if self.aborted:
            raise SweepAborted
        self.sweeps.append([(item.sequence.index, item.start, item.count) for item in work])
        self.clock.advance(self.cost.seconds(sum(item.count for item in work)))
        return [SampledToken(0) if item.wants_logits else None for item in work]

    def abort(self) -> None:
        self.aborted = True


@dataclass(frozen=True, slots=True)
class SimulatedRow:
    """A row that decodes ``decoded`` <= ``max_tokens`` tokens behind a prompt of ``prompt`` tokens."""

    prompt: int
    decoded: int
    max_tokens: int


class SimulatedOutput:
    """Ends its row after the given number of tokens."""

    def __init__(self, row: SimulatedRow, finished: list[int], index: int) -> None:
        self._row, self._finished, self._index = row, finished, index
        self._tokens = 0

    def accept(self, token: SampledToken) -> Finish | None:
        self._tokens += 1
        return Finish("stop") if self._tokens >= self._row.decoded else None

    def done(self, finish: Finish) -> None:
        self._finished.append(self._index)

    def failed(self, error: BaseException) -> None:
        self._finished.append(self._index)


class SimulatedSource:
    """Rows by their lengths only. Implements RequestSource; ``finished`` lists rows in the order of their ends."""

    def __init__(self, rows: Seq[SimulatedRow]) -> None:
        self._rows = rows
        self.finished: list[int] = []
        self.errors: dict[int, BaseException] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def size(self, index: int) -> RequestSize:
        row = self._rows[index]
        return RequestSize(row.prompt, row.max_tokens)

    def open(self, index: int) -> tuple[SequenceRequest, SimulatedOutput]:
        row = self._rows[index]
        request = SequenceRequest(
            index, range(row.prompt), SamplingParams(max_tokens=row.max_tokens, temperature=0.0), seed=0
        )
        return request, SimulatedOutput(row, self.finished, index)

    def failed(self, index: int, error: BaseException) -> None:
        self.errors[index] = error


async def simulate(rows: Seq[SimulatedRow], limits: Limits, cost: SweepCost) -> tuple[RunStatistics, SimulatedRunner]:
    """Run ``rows`` to the end on a virtual clock; the statistics' times are virtual seconds."""
    clock = VirtualClock()
    runner = SimulatedRunner(limits, cost, clock)
    return await Run(SimulatedSource(rows), runner, clock).drive(), runner
