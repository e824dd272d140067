"""The recorder behind --trace and --report: events of some sweeps, sums of all of them.

    events (event_log.py)     what happened when, tile by tile, for sweeps spread evenly over the run
    timeline (timeline.py)    where the engine's time went, bytes, batch and memory, for every moment of the run
    experts, lengths          reads and tokens of every (layer, expert); how long prompts and answers were

All of it has a fixed size, ``MEMORY_BYTES``, however long the run is. Sums are exact for the whole run, events are
exact where they are kept.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from batchgen_lite.trace.event_log import LIMIT_BYTES, EventLog, What
from batchgen_lite.trace.recorder import Recorder, States
from batchgen_lite.trace.timeline import Timeline

MEMORY_BYTES = LIMIT_BYTES * 3 // 2 + (4 << 20)
"""What a recorder may hold: the event log, and everything else."""

ENGINE_TIME = ("experts", "attention", "projections", "head", "sampling", "waiting", "between sweeps")
"""What the engine's time is spent on; the rest of a sweep (embedding, Python) is "other"."""

FLOWS = (
    *ENGINE_TIME,
    "sweeps",
    "link busy",
    "read",
    "resident",
    "copied in",
    "copied out",
    "spilled",
    "restored",
    "prefilled",
    "decoded",
    "swept tokens",
)
LEVELS = ("running", "held", "evicted", "queued", "done", "failed", "tokens", "memory", "kv pages")

# Module kinds; all others are projections.
_PARTS = {"experts": "experts", "dense": "experts", "head": "head", "sampler": "sampling"}
_STEPS = {"qkv": "attention", "absorb_k": "attention"}  # what slices do behind a module; all else is little
_BINS_PER_DOUBLING = 4


@dataclass(slots=True)
class ExpertRow:
    """One layer's experts: tokens that chose each, and how many times each was read."""

    tokens: list[int] = field(default_factory=list)
    reads: list[int] = field(default_factory=list)

    def reach(self, experts: int) -> None:
        missing = experts - len(self.tokens)
        self.tokens += [0] * missing
        self.reads += [0] * missing


class RunRecorder(Recorder):
    """Keeps what a trace and a report need. Its clock starts at 0 when it is made."""

    active = True
    memory_bytes = MEMORY_BYTES

    def __init__(self, log: EventLog | None = None, clock: Callable[[], float] = time.perf_counter) -> None:
        self.log = log or EventLog()
        self.timeline = Timeline(FLOWS, LEVELS)
        self.experts: dict[int, ExpertRow] = {}
        self.prompt_lengths: Counter[int] = Counter()
        self.generated_lengths: Counter[int] = Counter()
        self.reasons: Counter[str] = Counter()
        self.budgets: dict[str, tuple[int, dict[str, int]]] = {}
        """Flag of a memory budget -> its bytes, and what they are for."""
        self.sweeps = 0
        self._clock = clock
        self._origin = clock()
        self._lock = threading.Lock()
        self._counts: dict[int, Sequence[int]] = {}
        self._tokens = 0
        self._waited = 0.0  # within the module that runs
        self._link_busy_until = 0.0
        self._last_sweep_end: float | None = None

    def now(self) -> float:
        return self._clock() - self._origin

    # -- the link -------------------------------------------------------------------------------------------------

    def read(self, since: float, nbytes: int, file: int) -> None:
        end = self.now()
        with self._lock:
            # Submissions are served in order: this one had the link from the end of the one before.
            begin = min(max(since, self._link_busy_until), end)
            self._link_busy_until = end
            self.timeline.add("link busy", begin, end, end - begin)
            self.timeline.add("read", begin, end, nbytes)
        self.log.add(What.READ, begin, end - begin, "read", 0, file, 0, nbytes)

    def copied(self, since: float, nbytes: int, *, inward: bool) -> None:
        end = self.now()
        with self._lock:
            self.timeline.add("copied in" if inward else "copied out", since, end, nbytes)
        self.log.add(What.COPY_IN if inward else What.COPY_OUT, since, end - since, "copy", 0, 0, 0, nbytes)

    # -- the engine's thread --------------------------------------------------------------------------------------

    def submitted(self, layer: int, expert: int, nbytes: int) -> None:
        if expert >= 0:
            row = self._expert_row(layer, expert + 1)
            row.reads[expert] += 1

    def waited(self, since: float) -> None:
        end = self.now()
        self._waited += end - since
        with self._lock:
            self.timeline.add("waiting", since, end, end - since)
        self.log.add(What.WAIT, since, end - since, "wait for weights", 0, 0, 0, 0)

    def routed(self, layer: int, counts: Sequence[int]) -> None:
        self._counts[layer] = counts
        row = self._expert_row(layer, len(counts))
        for expert, tokens in enumerate(counts):
            row.tokens[expert] += tokens

    def tile(self, kind: str, layer: int, expert: int, nbytes: int, since: float, *, resident: bool) -> None:
        end = self.now()
        tokens = self._tokens
        if expert >= 0:
            counts = self._counts.get(layer, ())
            tokens = counts[expert] if expert < len(counts) else 0
        if resident:
            with self._lock:
                self.timeline.add("resident", since, end, nbytes)
        self.log.add(What.TILE, since, end - since, kind, layer, expert, tokens, nbytes)

    def module(self, kind: str, layer: int, tokens: int, since: float) -> None:
        end = self.now()
        computed = max(0.0, end - since - self._waited)
        self._waited = 0.0
        with self._lock:
            self.timeline.add(_PARTS.get(kind, "projections"), since, end, computed)
        self.log.add(What.MODULE, since, end - since, kind, layer, 0, tokens, 0)

    def slice_step(self, after: str, layer: int, tokens: int, since: float) -> None:
        end = self.now()
        with self._lock:
            self.timeline.add("attention", since, end, end - since)
        self.log.add(What.ATTENTION, since, end - since, _STEPS.get(after, "norm"), layer, 0, tokens, 0)

    # -- the run's own thread -------------------------------------------------------------------------------------

    def sweep_begins(self, tokens: int, states: States) -> None:
        now = self.now()
        self.log.new_sweep()
        self._tokens = tokens
        self._waited = 0.0
        since = self._last_sweep_end if self._last_sweep_end is not None else now
        with self._lock:
            self.timeline.add("between sweeps", since, now, now - since)
            self.timeline.sample("tokens", now, tokens)
            for name, value in _levels(states):
                self.timeline.sample(name, now, value)
        self.log.add(What.BETWEEN, since, now - since, "schedule, text, journal", 0, 0, 0, 0)

    def sweep_ends(self, since: float, prefilled: int, decoded: int, sequences: int) -> None:
        end = self.now()
        self.sweeps += 1
        self._last_sweep_end = end
        with self._lock:
            self.timeline.add("sweeps", since, end, end - since)
            self.timeline.add("prefilled", since, end, prefilled)
            self.timeline.add("decoded", since, end, decoded)
            self.timeline.add("swept tokens", since, end, self._tokens)
        self.log.add(What.SWEEP, since, end - since, "sweep", 0, sequences, self._tokens, 0)

    def run_ends(self) -> None:
        self._last_sweep_end = None

    def kv_moved(self, action: str, since: float, nbytes: int, row: int) -> None:
        end = self.now()
        if action in ("spilled", "restored"):
            with self._lock:
                self.timeline.add(action, since, end, nbytes)
        self.log.add(What.KV, since, end - since, action, 0, row, 0, nbytes)

    def finished(self, prompt_tokens: int, generated: int, reason: str) -> None:
        self.prompt_lengths[length_bin(prompt_tokens)] += 1
        self.generated_lengths[length_bin(generated)] += 1
        self.reasons[reason] += 1

    def accounts(self, budget: str, limit: int, held: Mapping[str, int]) -> None:
        self.budgets[budget] = (limit, dict(held))

    def memory(self, resident: int, kv_pages: int) -> None:
        now = self.now()
        with self._lock:
            self.timeline.sample("memory", now, resident)
            self.timeline.sample("kv pages", now, kv_pages)

    def _expert_row(self, layer: int, experts: int) -> ExpertRow:
        row = self.experts.setdefault(layer, ExpertRow())
        if len(row.tokens) < experts:
            row.reach(experts)
        return row


def _levels(states: States) -> tuple[tuple[str, int], ...]:
    return (
        ("running", states.running),
        ("held", states.held),
        ("evicted", states.evicted),
        ("queued", states.waiting),
        ("done", states.done),
        ("failed", states.failed),
    )


def length_bin(tokens: int) -> int:
    """The histogram's bin of a length: exact up to 8, four bins a doubling beyond; about 60 up to a million tokens."""
    if tokens <= 8:
        return max(0, tokens)
    return 8 + math.ceil(_BINS_PER_DOUBLING * math.log2(tokens / 8))


def bin_end(number: int) -> int:
    """The greatest length in a bin."""
    return number if number <= 8 else int(8 * 2 ** ((number - 8) / _BINS_PER_DOUBLING))
