"""A run on paper: the same scheduler, engine and coroutines, with sweeps that only take virtual time.

Schedules can so be tested exactly, and jobs forecast for machines that are not there. Torch-free.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace

from batchgen_lite.offload.pages import BlockTable, PageAllocator, pages_for
from batchgen_lite.runtime.clock import VirtualClock
from batchgen_lite.runtime.cost import SweepCost, SweepLoad
from batchgen_lite.runtime.engine import Run
from batchgen_lite.runtime.interface import Finish, RequestSize, SampledToken, SequenceRequest
from batchgen_lite.runtime.migration import MigrationChoice, Tier, TierState
from batchgen_lite.runtime.scheduler import Limits
from batchgen_lite.runtime.sequence import Sequence
from batchgen_lite.runtime.stats import RunStatistics
from batchgen_lite.runtime.tail import keeping, least_step
from batchgen_lite.runtime.work import PageChanges, SweepAborted, Work, load_of
from batchgen_lite.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class SweepTimes:
    """One simulated sweep: its load, its virtual seconds, those of disk, link and cores, and the bytes it read."""

    load: SweepLoad
    seconds: float
    reading: float
    linking: float
    computing: float
    bytes_read: float


@dataclass(slots=True)
class SimulatedRunner:
    """Implements SweepRunner: tokens are zeros, time passes on ``clock`` only. ``group``: query heads that share a KV
    head. ``scale``: every row stands for so many like it. ``least_free``: free pages at the fullest moment."""

    limits_: Limits
    cost: SweepCost
    clock: VirtualClock
    group: int = 1
    scale: float = 1.0
    allocator: PageAllocator = field(init=False)
    aborted: bool = False
    sweeps: list[list[tuple[int, int, int]]] = field(default_factory=list)  # (row, start, count) of every span
    times: list[SweepTimes] = field(default_factory=list)
    least_free: int = field(init=False)
    grown: float = 0.0  # bytes of weights that stay in memory once the coming sweep has read them

    def __post_init__(self) -> None:
        self.allocator = PageAllocator(self.limits_.capacity_pages)
        self.least_free = self.allocator.free

    def limits(self) -> Limits:
        return self.limits_

    async def run(self, work: Seq[Work], changes: PageChanges) -> list[SampledToken | None]:
        if self.aborted:
            raise SweepAborted
        self.sweeps.append([(item.sequence.index, item.start, item.count) for item in work])
        self.least_free = min(self.least_free, self.allocator.free)
        load, first = load_of(work, self.group).times(self.scale), not self.times
        self.times.append(
            SweepTimes(
                load,
                self.cost.seconds(load, first=first),
                self.cost.reading(load, first=first),
                self.cost.linking(load),
                self.cost.computing(load),
                self.cost.bytes_read(load, first=first),
            )
        )
        self.clock.advance(self.times[-1].seconds)
        if self.grown:
            self.cost, self.grown = keeping(self.cost, self.grown), 0.0
        return [SampledToken(0) if item.wants_logits else None for item in work]

    def abort(self) -> None:
        self.aborted = True


@dataclass(slots=True)
class SimulatedTail:
    """Implements TailMemory: as much weight stays in memory as pages are given up, of ``page_bytes`` each, whole tiles
    or not."""

    runner: SimulatedRunner
    page_bytes: float
    least: int = field(init=False)

    def __post_init__(self) -> None:
        self.least = least_step(self.runner.limits_.capacity_pages, self.page_bytes)

    async def keep_pages(self, pages: int, tables: Seq[BlockTable]) -> None:
        runner = self.runner
        freed = runner.allocator.capacity - pages
        if freed < self.least or runner.cost.streamed_bytes + runner.cost.routed_bytes <= 0:
            return
        moves = runner.allocator.shrink(pages)
        for table in tables:
            table.renumber(moves)
        runner.limits_ = replace(runner.limits_, capacity_pages=pages)
        runner.grown += freed * self.page_bytes


@dataclass(slots=True)
class SimulatedTier:
    """A lower tier on the virtual clock. Implements LowerTiers: taking a page there and bringing it back costs half of
    ``seconds_per_page`` each. ``fails``: holds and restores, counted together from 0, that go wrong."""

    clock: VirtualClock
    pages: int
    seconds_per_page: float
    cost: SweepCost
    group: int = 1
    tier: Tier = Tier.DISK
    page_bytes: int = 0
    fails: frozenset[int] = frozenset()
    kept: dict[int, int] = field(default_factory=dict)  # sequence -> pages
    moves: list[tuple[str, int]] = field(default_factory=list)

    def choice(self) -> MigrationChoice:
        state = TierState(self.tier, self.pages - sum(self.kept.values()), self.seconds_per_page)
        return MigrationChoice((state,), self.cost, self.group)

    async def hold(self, sequence: Sequence, tier: Tier) -> bool:
        self.kept[sequence.index] = pages_for(sequence.num_computed)
        return self._move("hold", sequence)

    async def restore(self, sequence: Sequence) -> bool:
        return self._move("restore", sequence)

    def _move(self, what: str, sequence: Sequence) -> bool:
        done = len(self.moves) not in self.fails
        self.moves.append((what, sequence.index))
        self.clock.advance(self.kept[sequence.index] * self.seconds_per_page / 2)
        if what == "restore" or not done:
            self.forget(sequence)
        return done

    def forget(self, sequence: Sequence) -> None:
        self.kept.pop(sequence.index, None)


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


async def simulate(
    rows: Seq[SimulatedRow],
    limits: Limits,
    cost: SweepCost,
    *,
    group: int = 1,
    scale: float = 1.0,
    page_bytes: float = 0.0,
    spill: TierState | None = None,
) -> tuple[RunStatistics, SimulatedRunner]:
    """Run ``rows`` to the end on a virtual clock; the statistics' times are virtual seconds. ``page_bytes``: of each of
    the limits' pages, which become weights in the job's tail; 0 = they do not. ``spill``: where KV of rows that sit out
    may go."""
    clock = VirtualClock()
    runner = SimulatedRunner(limits, cost, clock, group, scale)
    tail = SimulatedTail(runner, page_bytes) if page_bytes else None
    lower = None if spill is None else SimulatedTier(clock, spill.free_pages, spill.seconds_per_page, cost, group)
    return await Run(SimulatedSource(rows), runner, clock, lower=lower, tail=tail).drive(), runner
