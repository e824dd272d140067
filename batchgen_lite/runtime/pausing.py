"""Sequences that sit out: how they leave the device tier and how they come back."""

from __future__ import annotations

from bisect import insort

from batchgen_lite.offload.pages import pages_for
from batchgen_lite.runtime.migration import LowerTiers, MigrationChoice, Tier
from batchgen_lite.runtime.primitives import migrate
from batchgen_lite.runtime.sequence import Sequence, State
from batchgen_lite.runtime.stats import RunStatistics
from batchgen_lite.trace.recorder import Recorder


class PausedSequences:
    """Evicted and held sequences, by admission. ``lower``: where KV may go, None = nowhere: it is computed again."""

    def __init__(self, lower: LowerTiers | None, statistics: RunStatistics, recorder: Recorder) -> None:
        self.lower = lower
        self._statistics = statistics
        self._recorder = recorder
        self._sequences: list[Sequence] = []

    def current(self) -> list[Sequence]:
        """Those that are paused at this moment; what has ended since is dropped from the books."""
        self._sequences = [s for s in self._sequences if s.state in (State.EVICTED, State.HELD)]
        return self._sequences

    def choice(self) -> MigrationChoice | None:
        """What the scheduler may choose from."""
        return None if self.lower is None else self.lower.choice()

    async def pause(self, sequence: Sequence, tier: Tier | None) -> None:
        """Take a running sequence out, its KV to ``tier``; to token ids if that is None or does not succeed."""
        since = self._recorder.now()
        kept = tier is not None and self.lower is not None and await self.lower.hold(sequence, tier)
        nbytes = self._nbytes(sequence.num_computed) if kept else 0
        migrate(sequence, kept=kept)
        insort(self._sequences, sequence, key=lambda s: s.admission)
        if kept:
            self._statistics.holds += 1
        else:
            self._statistics.evictions += 1
        self._recorder.kv_moved("spilled" if kept else "evicted", since, nbytes, sequence.index)

    async def resume(self, sequence: Sequence) -> bool:
        """Let a paused sequence run again. False if its KV does not come back as it was: then it has been evicted, and
        sits the sweep out that was planned with it."""
        if sequence.state is State.EVICTED:
            sequence.move(State.RUNNING)
            return True
        since, held = self._recorder.now(), sequence.held
        sequence.table.reserve(held)
        if self.lower is None or not await self.lower.restore(sequence):
            migrate(sequence)
            self._statistics.evictions += 1
            self._recorder.kv_moved("evicted", since, 0, sequence.index)
            return False
        sequence.move(State.RUNNING)
        sequence.table.commit(held)
        self._recorder.kv_moved("restored", since, self._nbytes(held), sequence.index)
        return True

    def forget(self, sequence: Sequence) -> None:
        """``sequence`` has ended: nothing is kept of it in a lower tier."""
        if self.lower is not None:
            self.lower.forget(sequence)

    def _nbytes(self, positions: int) -> int:
        return 0 if self.lower is None else pages_for(positions) * self.lower.page_bytes
