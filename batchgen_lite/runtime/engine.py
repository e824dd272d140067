"""The engine: sequence coroutines on one side, sweeps on the other.

    source ──admit──> generate(...)      one coroutine per running sequence, created at admission
                          │  ^
              parks until │  │ its token
                          v  │
        next_sweep(snapshot) -> plan -> runner.run(work) -> commit -> wake

Between two sweeps everything is at rest: every coroutine is parked, no token and no page count changes. Then the
scheduler plans, the engine carries the plan out, one sweep runs, and only when it has returned are its spans committed
and its sequences woken. A sweep that ends with an exception has not happened.

One row's error is that row's record. Only the sweep itself, and the disk that records are written to, end a run.
"""

from __future__ import annotations

import asyncio
from bisect import insort

from batchgen_lite.errors import RowError, StorageError
from batchgen_lite.offload.pages import PAGE_TOKENS
from batchgen_lite.runtime.clock import Clock
from batchgen_lite.runtime.cost import Remaining
from batchgen_lite.runtime.interface import Finish, RequestSource, SequenceOutput, SequenceRequest
from batchgen_lite.runtime.migration import LowerTiers
from batchgen_lite.runtime.parking import PARKED, Parkable, resume
from batchgen_lite.runtime.pausing import PausedSequences
from batchgen_lite.runtime.scheduler import Snapshot, SweepPlan, next_sweep
from batchgen_lite.runtime.sequence import Sequence, State
from batchgen_lite.runtime.stats import RunStatistics
from batchgen_lite.runtime.tail import TailMemory, pages_needed
from batchgen_lite.runtime.waiting import WaitingQueue
from batchgen_lite.runtime.work import PageChanges, SweepAborted, SweepRunner, Work
from batchgen_lite.trace.recorder import SILENT, Recorder, States

LEARN_FROM = 10  # finished rows before the average decoded length is believed
FORGET = 0.1  # weight of the newest row in that average


class Live:
    """A sequence that has been admitted and not ended, with what belongs to it."""

    __slots__ = ("coroutine", "output", "request", "sequence")

    coroutine: Parkable

    def __init__(self, sequence: Sequence, request: SequenceRequest, output: SequenceOutput) -> None:
        self.sequence = sequence
        self.request = request
        self.output = output


class Run:
    """One job on its way through a runner. Use: ``await Run(...).drive()``, once."""

    def __init__(
        self,
        source: RequestSource,
        runner: SweepRunner,
        clock: Clock,
        recorder: Recorder = SILENT,
        lower: LowerTiers | None = None,
        tail: TailMemory | None = None,
    ) -> None:
        """``lower``: where the KV of sequences that sit out may go, None = nowhere: it is computed again. ``tail``:
        takes KV memory that nobody can need any more, None = it stays."""
        self.source = source
        self.runner = runner
        self.clock = clock
        self.recorder = recorder
        self.statistics = RunStatistics(rows_total=len(source))
        self._waiting = WaitingQueue(source)
        self._live: dict[int, Live] = {}
        self._running: list[Sequence] = []  # by admission
        self._paused = PausedSequences(lower, self.statistics, recorder)
        self._tail = tail
        self._admissions = 0
        self._decoded_average = 0.0
        self._stopping = False
        self._fatal: BaseException | None = None
        self._remaining: Remaining | None = None  # counted since the last sweep

    # -- the life of one sequence ---------------------------------------------------------------------------------

    async def _generate(self, live: Live) -> None:
        """One row from its admission to its record."""
        sequence, output = live.sequence, live.output
        finish: Finish | None = None
        try:
            while finish is None:
                sampled = await PARKED
                if sampled is None:  # a part of the prompt went by
                    continue
                if sampled.error is not None:
                    raise RowError("non_finite_logits", sampled.error)
                sequence.append(sampled.token)
                finish = output.accept(sampled)
                if finish is None and sequence.remaining <= 0:
                    finish = Finish("length")
            sequence.move(State.DONE)
            output.done(finish)
            self._learn(len(sequence.tokens) - sequence.prompt_length)
            self.recorder.finished(sequence.prompt_length, len(sequence.tokens) - sequence.prompt_length, finish.reason)
        except StorageError as error:  # its record cannot be written, and neither could another row's
            self._fatal = self._fatal or error
        except Exception as error:
            self._fail(live, error)
        finally:
            sequence.table.truncate(0)  # nothing left unless the run was cut short
            self._paused.forget(sequence)
            del self._live[sequence.index]

    def _fail(self, live: Live, error: Exception) -> None:
        if live.sequence.state is not State.DONE:
            live.sequence.move(State.FAILED)
        self.statistics.rows_failed += 1
        prompt = live.sequence.prompt_length
        self.recorder.finished(prompt, len(live.sequence.tokens) - prompt, "failed")
        try:
            live.output.failed(error)
        except StorageError as storage:
            self._fatal = self._fatal or storage

    def _learn(self, decoded: int) -> None:
        self.statistics.rows_done += 1
        weight = FORGET if self.statistics.rows_done > 1 else 1.0
        self._decoded_average += weight * (decoded - self._decoded_average)

    # -- the life of the job --------------------------------------------------------------------------------------

    async def drive(self) -> RunStatistics:
        """Until every row has its record, or ``stop``. Raises what ended the run otherwise."""
        self.statistics.begin(self.clock.now())
        try:
            while not self._stopping:
                await self._give_up_pages()
                plan = next_sweep(self._snapshot())
                await self._prepare(plan)
                if plan.spans:
                    await self._sweep(plan)
                elif not (plan.fail or plan.hold or plan.evict or plan.refuse or plan.admit):
                    if self._live or len(self._waiting):
                        raise RuntimeError(f"nothing can run, yet {len(self._live)} sequences are not done")
                    break
                if self._fatal is not None:
                    raise self._fatal
        finally:
            self._close_all()
            self.statistics.end(self.clock.now())
            self.statistics.stopped_early = self._stopping
        return self.statistics

    def stop(self) -> None:
        """End the run soon: abort the sweep in flight, commit nothing of it. Safe from any thread."""
        self._stopping = True
        self.runner.abort()

    @property
    def remaining_rows(self) -> int:
        return len(self._waiting) + len(self._live)

    @property
    def live_rows(self) -> int:
        return len(self._live)

    def remaining(self) -> Remaining:
        """The work left as of the last sweep; asked for several times in each by a display, and counted once."""
        if self._remaining is None:
            self._remaining = self._count_remaining()
        return self._remaining

    def _count_remaining(self) -> Remaining:
        """Rows are expected to decode as many tokens as those that have ended, else all they may; one that has outlived
        that, half as many again: who is late tends to stay."""
        average = self._decoded_average if self.statistics.rows_done else None
        prefill = float(self._waiting.prompt_tokens)
        decode = float(self._waiting.new_tokens) if average is None else len(self._waiting) * average
        longest = 0.0
        for live in list(self._live.values()):
            sequence = live.sequence
            prefill += max(0, sequence.pending - 1)
            expected = float(sequence.remaining)
            if average is not None:
                done = len(sequence.tokens) - sequence.prompt_length
                expected = min(expected, max(average - done, average / 2, 1.0))
            decode += expected
            longest = max(longest, expected)
        if len(self._waiting):
            longest = max(longest, decode / max(1, self.remaining_rows))
        return Remaining(self.remaining_rows, prefill, decode, longest, live=len(self._live))

    async def _give_up_pages(self) -> None:
        """Once no row waits or sits out, nobody but the running ones can come to need a page."""
        if self._tail is None or len(self._waiting) or self._paused.current():
            return
        running = [sequence for sequence in self._running if sequence.state is State.RUNNING]
        if running:
            await self._tail.keep_pages(pages_needed(running), [sequence.table for sequence in running])

    def _snapshot(self) -> Snapshot:
        self._running = [sequence for sequence in self._running if sequence.state is State.RUNNING]
        growth = PAGE_TOKENS
        if self.statistics.rows_done >= LEARN_FROM:
            growth = max(PAGE_TOKENS, -(-int(1.5 * self._decoded_average) // PAGE_TOKENS) * PAGE_TOKENS)
        return Snapshot(
            running=self._running,
            paused=self._paused.current(),
            waiting=self._waiting,
            free_pages=self.runner.allocator.free,
            growth=growth,
            limits=self.runner.limits(),
            migration=self._paused.choice(),
        )

    async def _prepare(self, plan: SweepPlan) -> None:
        """Everything of the plan but the sweep: who leaves, who comes back, who is admitted."""
        for index in plan.fail:
            live = self._live[index]
            resume(live.coroutine, self._too_long(f"{len(live.sequence.tokens)} tokens do not"))
        for index, tier in plan.hold.items():
            await self._paused.pause(self._live[index].sequence, tier)
        for index in plan.evict:
            await self._paused.pause(self._live[index].sequence, None)
        for index in plan.resume:
            sequence = self._live[index].sequence
            if await self._paused.resume(sequence):
                insort(self._running, sequence, key=lambda s: s.admission)
        self._waiting.drop(len(plan.refuse) + len(plan.admit))
        for index in plan.refuse:
            size = self.source.size(index)
            self._refuse(index, self._too_long(f"a prompt of {size.prompt_tokens} tokens does not"))
        for index in plan.admit:
            self._admit(index)

    def _too_long(self, what: str) -> RowError:
        capacity = self.runner.limits().capacity_pages * PAGE_TOKENS
        return RowError(
            "capacity",
            f"{what} fit into the KV cache of {capacity} tokens even alone; give more memory, or --kv-dtype int8",
        )

    def _admit(self, index: int) -> None:
        try:
            request, output = self.source.open(index)
        except StorageError as error:
            self._fatal = self._fatal or error
            return
        except Exception as error:
            self._refuse(index, error)
            return
        sequence = Sequence(index, request.prompt_ids, request.sampling.max_tokens, self.runner.allocator)
        for token in request.prior_ids:
            sequence.append(token)
        sequence.admission = self._admissions
        self._admissions += 1
        sequence.move(State.RUNNING)
        self._running.append(sequence)
        live = self._live[index] = Live(sequence, request, output)
        live.coroutine = self._generate(live)
        resume(live.coroutine, None)

    def _refuse(self, index: int, error: Exception) -> None:
        self.statistics.rows_failed += 1
        try:
            self.source.failed(index, error)
        except StorageError as storage:
            self._fatal = self._fatal or storage

    async def _sweep(self, plan: SweepPlan) -> None:
        """Reserve, run, commit, wake; returns when every coroutine is parked again."""
        work, coroutines, fresh, copies = [], [], [], []
        for span in plan.spans:
            live = self._live.get(span.index)
            if live is None or live.sequence.state is not State.RUNNING:
                continue  # it failed while it was opened, or its KV could not be brought back
            table = live.sequence.table
            held = len(table.pages)
            replaced = table.reserve(plan.reserve[span.index])
            if replaced:
                copies += replaced
            fresh += table.pages[held:]
            work.append(Work(live.sequence, live.request, span.start, span.count))
            coroutines.append(live.coroutine)
        if not work or self._stopping:
            return
        if self.recorder.active:
            self.recorder.sweep_begins(sum(item.count for item in work), self._states())
        self._remaining = None  # rows have been admitted
        started, since = self.clock.now(), self.recorder.now()
        try:
            sampled = await self.runner.run(work, PageChanges(fresh, copies))
        except SweepAborted:
            self._stopping = True
            return
        except MemoryError:
            self.statistics.sweeps_retried += 1
            return  # the runner's limits are smaller now; plan again
        record = self.statistics.record_sweep(started, self.clock.now(), work)
        self.recorder.sweep_ends(since, record.prefilled, record.decoded, record.sequences)
        for item, coroutine, token in zip(work, coroutines, sampled, strict=True):
            item.sequence.table.commit(item.count)
            resume(coroutine, token)
        self._remaining = None
        await asyncio.sleep(0)  # whoever else lives on this loop: progress, signals

    def _states(self) -> States:
        running = sum(sequence.state is State.RUNNING for sequence in self._running)
        held = sum(live.sequence.state is State.HELD for live in self._live.values())
        evicted = len(self._live) - running - held
        statistics = self.statistics
        return States(running, held, evicted, len(self._waiting), statistics.rows_done, statistics.rows_failed)

    def _close_all(self) -> None:
        """End the coroutines that are still parked; their rows stay unanswered and can be resumed."""
        for live in list(self._live.values()):
            live.coroutine.close()
