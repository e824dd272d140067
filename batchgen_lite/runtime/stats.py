"""Figures of a run, counted where things happen: rows, tokens, sweeps, and rates over the last few seconds."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from batchgen_lite.runtime.work import Work

RATE_SECONDS = 10.0  # rates are over at least this long, and at least one sweep


@dataclass(frozen=True, slots=True)
class SweepRecord:
    """One committed sweep: times in seconds of the run's clock, tokens computed, rows that got a token."""

    started: float
    ended: float
    tokens: int
    prefilled: int
    decoded: int
    sequences: int


@dataclass(slots=True)
class RunStatistics:
    """Totals of one run. ``decoded`` counts sampled tokens; ``prefilled`` every computed token that was not the
    decoding of one sampled before, so a prompt's tokens, again after an eviction; ``evictions`` pauses that dropped the
    KV, ``holds`` those that kept it in a lower tier."""

    rows_total: int = 0
    rows_done: int = 0
    rows_failed: int = 0
    sweeps: int = 0
    sweeps_retried: int = 0
    evictions: int = 0
    holds: int = 0
    prefilled: int = 0
    decoded: int = 0
    most_sequences: int = 0
    sweep_seconds: float = 0.0
    started: float = 0.0
    ended: float | None = None
    stopped_early: bool = False
    recent: deque[SweepRecord] = field(default_factory=deque)

    def begin(self, now: float) -> None:
        self.started = now

    def end(self, now: float) -> None:
        self.ended = now

    def record_sweep(self, started: float, ended: float, work: Seq[Work]) -> SweepRecord:
        """A sweep has returned; called before its sequences learn of their tokens."""
        tokens = decoded = prefilled = 0
        for item in work:
            tokens += item.count
            decoded += item.wants_logits
            if item.count > 1 or item.start < item.sequence.prompt_length:
                prefilled += item.count
        self.sweeps += 1
        self.prefilled += prefilled
        self.decoded += decoded
        self.most_sequences = max(self.most_sequences, len(work))
        self.sweep_seconds += ended - started
        record = SweepRecord(started, ended, tokens, prefilled, decoded, len(work))
        self.recent.append(record)
        while len(self.recent) > 1 and self.recent[1].started < ended - RATE_SECONDS:
            self.recent.popleft()
        return record

    @property
    def decode_rate(self) -> float:
        """Tokens sampled per second of late."""
        if not self.recent:
            return 0.0
        seconds = self.recent[-1].ended - self.recent[0].started
        return sum(record.decoded for record in self.recent) / seconds if seconds > 0 else 0.0
