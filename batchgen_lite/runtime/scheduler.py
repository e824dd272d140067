"""What the next sweep does: a pure function from what is known to a plan. No tensors, no clock, no side effects.

A sweep costs one pass over the weights, whatever it carries, so the scheduler's aim is to make every sweep carry much:
keep as many sequences running as KV pages allow, let prompts ride along with decode steps, and never let a sequence
that waits for nothing sit out a sweep.

The order of claims on pages and tokens, each served before the next:

1. decode steps of running sequences, first admitted first;
2. pending prompt tokens of running sequences, up to the token budget;
3. paused sequences, evicted or held in a lower tier, first admitted first: nothing overtakes them;
4. new admissions, longest-lived first (waiting.py; a long row started late would be a tail that runs alone).

A running sequence that needs a page when none is free takes those of the *last* admitted running sequence, if that was
admitted after it, else it is taken out itself. Whoever is taken out is held in a lower tier or evicted to its token
ids, whichever costs less (runtime/migration.py). So the oldest sequence always moves on: there is no livelock, and
nobody is taken out for the sake of a later admission. Admissions leave a small reserve, so that the sequences already
running do not run short at the next page boundary. A sequence that could not even run alone is failed with a capacity
error instead of waiting for ever.

Pages are reserved for a growing stretch of expected tokens, not for ``max_tokens``; admission, reservation and growth
use the one formula ``reservation``.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from batchgen_lite.offload.pages import PAGE_TOKENS, pages_for
from batchgen_lite.runtime.cost import SweepLoad, page_visits
from batchgen_lite.runtime.interface import RequestSize
from batchgen_lite.runtime.migration import MigrationChoice, Tier, TierState
from batchgen_lite.runtime.primitives import partition
from batchgen_lite.runtime.sequence import Sequence


@dataclass(slots=True)
class Span:
    """``count`` >= 1 tokens of one sequence from position ``start`` on; logits are wanted if it reaches the end."""

    index: int
    start: int
    count: int


@dataclass(slots=True)
class SweepPlan:
    """One sweep. Lists are in the order in which the engine has to carry them out: fail, hold, evict, resume, admit."""

    spans: list[Span] = field(default_factory=list)
    reserve: dict[int, int] = field(default_factory=dict)  # sequence -> tokens its table must have room for
    fail: list[int] = field(default_factory=list)  # running or paused sequences that cannot fit even alone
    hold: dict[int, Tier] = field(default_factory=dict)  # sequence -> where its KV goes
    evict: list[int] = field(default_factory=list)
    resume: list[int] = field(default_factory=list)  # evicted or held sequences
    admit: list[int] = field(default_factory=list)  # heads of the waiting queue, in its order
    refuse: list[int] = field(default_factory=list)  # waiting rows whose prompt cannot fit even alone

    @property
    def tokens(self) -> int:
        return sum(span.count for span in self.spans)


@dataclass(frozen=True, slots=True)
class Limits:
    """What the planner allows a sweep: tokens in all, sequences at once, and KV pages in all."""

    token_budget: int
    max_sequences: int
    capacity_pages: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Read-only view of the moment between two sweeps. ``running`` and ``paused`` (evicted and held) in order of
    admission; ``waiting`` the queue from its head on, as (index, size); ``migration`` None: there is no lower tier."""

    running: Seq[Sequence]
    paused: Seq[Sequence]
    waiting: Iterable[tuple[int, RequestSize]]
    free_pages: int
    growth: int  # tokens beyond the known ones that a sequence is expected to need soon
    limits: Limits
    migration: MigrationChoice | None = None


def reservation(tokens: int, remaining: int, growth: int) -> int:
    """Tokens to reserve KV for: the known ones plus the part of the remaining ones that is expected soon."""
    return tokens + min(max(remaining, 0), growth)


def next_sweep(snapshot: Snapshot) -> SweepPlan:
    """Plan one sweep; an empty plan means that nothing can run."""
    draft = _Draft(snapshot)
    draft.decode_steps()
    draft.pending_prompts()
    draft.resume_paused()
    draft.admit_waiting()
    return draft.plan


def _tiers(snapshot: Snapshot) -> tuple[TierState, ...]:
    return () if snapshot.migration is None else snapshot.migration.tiers


class _Draft:
    """The plan while it is made, with a ledger of pages and tokens still to be had."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.snapshot = snapshot
        self.plan = SweepPlan()
        self.free = snapshot.free_pages
        self.capacity = snapshot.limits.capacity_pages
        self.alive = list(snapshot.running)  # victims are taken from the end
        self.gone: set[int] = set()
        self.tier_pages = {state.tier: state.free_pages for state in _tiers(snapshot)}
        self.owed: int | None = None
        self.decoding: list[Sequence] = []
        self.prefilling: list[Sequence] = []
        for sequence in snapshot.running:
            (self.decoding if sequence.pending == 1 else self.prefilling).append(sequence)
        self.prompt_tokens = max(0, snapshot.limits.token_budget - len(self.decoding))

    # -- the four claims ------------------------------------------------------------------------------------------

    def decode_steps(self) -> None:
        for sequence in self.decoding:
            table, index = sequence.table, sequence.index
            needed = table.length + 1
            if self.gone and index in self.gone:
                continue
            if needed > table.capacity:
                self._run(sequence, 1)
                continue
            self.plan.reserve[index] = needed  # as _run does, for the many that need no page
            self.plan.spans.append(Span(index, table.length, 1))

    def pending_prompts(self) -> None:
        for sequence in self.prefilling:
            if self.prompt_tokens == 0:
                return
            if sequence.index not in self.gone:
                _, count = partition(sequence, self.prompt_tokens)
                if self._run(sequence, count):
                    self.prompt_tokens -= count

    def resume_paused(self) -> None:
        for sequence in self.snapshot.paused:
            tokens = len(sequence.tokens)
            if pages_for(tokens) > self.capacity:
                self.plan.fail.append(sequence.index)
                continue
            if not self._enter(sequence.index, sequence.held, tokens, sequence.remaining):
                self.prompt_tokens = 0  # nothing overtakes it
                return
            self.plan.resume.append(sequence.index)

    def admit_waiting(self) -> None:
        if self.plan.evict or self.plan.hold:
            return  # pages are short: whoever was just taken out comes first
        for index, size in self.snapshot.waiting:
            if pages_for(size.prompt_tokens) > self.capacity:
                self.plan.refuse.append(index)
                continue
            if not self._enter(index, 0, size.prompt_tokens, size.max_tokens):
                return
            self.plan.admit.append(index)

    # -- the ledger -----------------------------------------------------------------------------------------------

    def _run(self, sequence: Sequence, count: int) -> bool:
        """Give ``sequence`` a span of ``count`` tokens, finding the pages for it; False if it had to be taken out."""
        needed = sequence.num_computed + count
        missing = sequence.table.pages_missing(needed)
        if missing:
            if pages_for(needed) > self.capacity:
                self._take_out(sequence)
                self.plan.fail.append(sequence.index)
                return False
            while self.free < missing:
                victim = self.alive[-1]
                self._take_out(victim)
                self._migrate(victim)
                if victim is sequence:
                    return False
            wanted = reservation(len(sequence.tokens), sequence.remaining, self.snapshot.growth)
            chunk = min(sequence.table.pages_missing(wanted), self.free)
            self.free -= max(missing, chunk)
            needed = sequence.table.capacity + max(missing, chunk) * PAGE_TOKENS
        self.plan.reserve[sequence.index] = needed
        self.plan.spans.append(Span(sequence.index, sequence.num_computed, count))
        return True

    def _take_out(self, sequence: Sequence) -> None:
        """``sequence`` is no part of this sweep; its pages are free again unless somebody shares them."""
        self.alive.remove(sequence)
        self.gone.add(sequence.index)
        self.free += sum(1 for page in sequence.table.pages if sequence.table.allocator.references(page) == 1)

    def _migrate(self, victim: Sequence) -> None:
        """Choose where the KV of a sequence that was taken out goes."""
        choice, positions = self.snapshot.migration, victim.num_computed
        tier = None
        if choice is not None:
            tier = choice.choose(positions, self.tier_pages, self._load(choice), self.snapshot.limits.token_budget)
        if tier is None:
            self.plan.evict.append(victim.index)
        else:
            self.plan.hold[victim.index] = tier
            self.tier_pages[tier] -= pages_for(positions)

    def _load(self, choice: MigrationChoice) -> SweepLoad:
        """What sweeps carry beside a prefill: the decode steps of those that stay."""
        decoding = [sequence for sequence in self.alive if sequence.pending == 1]
        visits = sum(page_visits(s.num_computed, 1, choice.group, PAGE_TOKENS) for s in decoding)
        return SweepLoad(len(decoding), len(decoding), visits)

    def _enter(self, index: int, start: int, tokens: int, remaining: int) -> bool:
        """Let a sequence with no pages start at position ``start`` of ``tokens`` known ones, if pages and budget allow.
        Positions before it are held in a lower tier and need pages too."""
        running = len(self.alive) + len(self.plan.resume) + len(self.plan.admit)
        if self.prompt_tokens == 0 or running >= self.snapshot.limits.max_sequences:
            return False
        wanted = min(reservation(tokens, remaining, self.snapshot.growth), self.capacity * PAGE_TOKENS)
        # Pages that the running ones will need within a sweep or so: one in 64 of them, if they may need any at all.
        reserve = min(running // PAGE_TOKENS, self._owed())
        if pages_for(wanted) + reserve > self.free:
            return False
        count = min(tokens - start, self.prompt_tokens)
        self.free -= pages_for(wanted)
        self.owed = self._owed() + pages_for(tokens + max(0, remaining)) - pages_for(wanted)
        self.prompt_tokens -= count
        self.plan.reserve[index] = wanted
        self.plan.spans.append(Span(index, start, count))
        return True

    def _owed(self) -> int:
        """Pages that the sequences of this sweep may come to need beyond those they have or are about to get."""
        if self.owed is None:
            self.owed = 0
            for sequence in self.alive:
                last = pages_for(len(sequence.tokens) + max(0, sequence.remaining))
                has = max(len(sequence.table.pages), pages_for(self.plan.reserve.get(sequence.index, 0)))
                self.owed += max(0, last - has)
        return self.owed
