"""A sequence: tokens, how far they are computed, its pages, and the state machine it moves through.

There are no phases. A sequence is its tokens plus ``num_computed``; whatever is known but not computed is *pending*:
a whole prompt, its rest, one sampled token, or all of it again after an eviction. Torch-free.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Seq
from enum import Enum

from batchgen_lite.offload.pages import BlockTable, PageAllocator, pages_for


class State(Enum):
    """Where a sequence is in its life."""

    QUEUED = "queued"  # known, not admitted: holds nothing
    RUNNING = "running"  # takes part in sweeps; its KV is on the device tier
    HELD = "held"  # paused; its KV lies in a lower tier
    EVICTED = "evicted"  # paused; only its token ids are kept, KV will be computed again
    DONE = "done"
    FAILED = "failed"


MOVES: dict[State, frozenset[State]] = {
    State.QUEUED: frozenset({State.RUNNING, State.FAILED}),
    State.RUNNING: frozenset({State.HELD, State.EVICTED, State.DONE, State.FAILED}),
    State.HELD: frozenset({State.RUNNING, State.EVICTED, State.FAILED}),
    State.EVICTED: frozenset({State.RUNNING, State.FAILED}),
    State.DONE: frozenset(),
    State.FAILED: frozenset(),
}


class IllegalMove(Exception):
    """A state change that the state machine does not know: always a bug."""


class Sequence:
    """One row on its way. ``index`` is its place in the job, ``admission`` its rank among admissions (-1 before);
    ``held``: positions whose KV lies in a lower tier, 0 unless it is HELD."""

    __slots__ = ("admission", "held", "index", "max_tokens", "prompt_length", "state", "table", "tokens")

    def __init__(self, index: int, prompt_ids: Seq[int], max_tokens: int, allocator: PageAllocator) -> None:
        self.index = index
        self.tokens = array("q", prompt_ids)
        self.prompt_length = len(self.tokens)
        self.max_tokens = max_tokens
        self.table = BlockTable(allocator)
        self.state = State.QUEUED
        self.admission = -1
        self.held = 0

    @property
    def num_computed(self) -> int:
        """Positions whose KV is valid and on the device tier."""
        return self.table.length

    @property
    def pending(self) -> int:
        """Tokens known but not computed: 1 while decoding, more while (re-)prefilling."""
        return len(self.tokens) - max(self.table.length, self.held)

    @property
    def remaining(self) -> int:
        """Tokens it may still generate."""
        return self.max_tokens - (len(self.tokens) - self.prompt_length)

    def move(self, state: State) -> None:
        """Change state; releases all pages when it leaves for a state that holds none. ``held`` is set by the move to
        HELD, and nothing of a sequence is held in any other state."""
        if state not in MOVES[self.state]:
            raise IllegalMove(f"sequence {self.index}: {self.state.value} -> {state.value}")
        self.state = state
        self.held = self.table.length if state is State.HELD else 0
        if state in (State.HELD, State.EVICTED, State.DONE, State.FAILED):
            self.table.truncate(0)

    def append(self, token: int) -> None:
        """A sampled token becomes known; its KV is computed by the next sweep."""
        self.tokens.append(token)

    def check(self, planned: int = 0) -> None:
        """Raise AssertionError unless the invariants hold; ``planned`` tokens are about to be computed."""
        pages = len(self.table.pages)
        assert pages >= pages_for(self.num_computed + planned), (self.index, pages, self.num_computed, planned)
        assert self.num_computed + planned <= len(self.tokens), (self.index, self.num_computed, planned)
        if self.state is not State.RUNNING:
            assert pages == 0, (self.index, self.state, pages)
        assert (self.held > 0) == (self.state is State.HELD), (self.index, self.state, self.held)
        assert all(self.table.allocator.references(page) > 0 for page in self.table.pages), self.index
