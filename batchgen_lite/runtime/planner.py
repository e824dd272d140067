"""How memory is divided: a pure function from sizes to a plan. No torch, no allocation, no measuring.

The order of claims on a budget:

1. what every run needs: the process itself, a workspace for one sweep's activations, a ring for weights in flight;
2. KV pages, until they cover all rows of the job: a sweep costs one pass over the streamed weights, so while the model
   exceeds memory, a byte of KV (a larger batch) is worth more than a byte of resident weights (reference: throughput
   is proportional to (R - x) / (W - x) for x of R bytes spent on residents of W, falling in x as long as R < W);
3. the embedding, then resident tiles, spread evenly over the layers.

If the whole model fits beside enough pages to keep the cores busy, all of it becomes resident and there is no ring.
"""

from __future__ import annotations

from dataclasses import dataclass

from batchgen_lite.errors import BudgetError
from batchgen_lite.offload.pages import pages_for
from batchgen_lite.runtime.activations import ActivationShape
from batchgen_lite.runtime.padding import padded

MIB = 1 << 20
MARGIN = 40 * MIB  # the allocator's slack, BLAS' packing buffers, thread stacks, event loop
SEQUENCE_BYTES = 16 << 10  # of Python objects for one running sequence
TOKEN_STEPS = (16, 32, 64, 128, 256, 512, 768, 1024, 1536, 2048, 3072, 4096)
LARGEST_SLICE = 256
ENOUGH_ROWS = 64  # a batch from which on a resident model keeps the cores busy


@dataclass(frozen=True, slots=True)
class ModelSize:
    """Bytes of a model as it will lie in memory, over-reads included. ``page``: one KV page in all layers."""

    tiles: int
    largest_load: int
    embedding: int
    page: int
    activations: ActivationShape


@dataclass(frozen=True, slots=True)
class JobSize:
    """What is known of a job beforehand. ``pages``: to hold every row to its last possible token, all at once."""

    rows: int
    prompt_tokens: int
    longest_prompt: int
    pages: int


@dataclass(frozen=True, slots=True)
class Overrides:
    """Values that somebody insists on, for experiments and tests; None = planned."""

    token_budget: int | None = None
    max_sequences: int | None = None
    slice_tokens: int | None = None
    kv_pages: int | None = None
    ring_bytes: int | None = None
    resident_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The division. ``resident_bytes`` is an upper bound that whole tiles will fill; ``all_resident`` means no ring."""

    token_budget: int
    max_sequences: int
    slice_tokens: int
    kv_pages: int
    ring_bytes: int
    resident_bytes: int
    embedding_resident: bool
    workspace_bytes: int
    transient_bytes: int
    all_resident: bool


def plan_memory(model: ModelSize, job: JobSize, ram: int, process: int, wish: Overrides) -> MemoryPlan:
    """Divide ``ram`` bytes, of which the process itself holds ``process`` already.

    Raises BudgetError, with the smallest budget that works, if one sweep of the smallest kind does not fit.
    """
    need = _Need(model, job, wish)
    room = ram - process - MARGIN
    if room < need.least():
        smallest = process + MARGIN + need.least()
        raise BudgetError(
            f"--ram {ram / MIB:.0f}MiB is too small for this model and input: "
            f"at least {-(-smallest // MIB)}MiB are needed"
        )
    tokens = need.token_budget(room)
    sequences = need.max_sequences(tokens, room)
    workspace, transient = need.workspace(tokens, sequences), need.transient(tokens)
    room -= workspace + transient + sequences * SEQUENCE_BYTES
    wanted = wish.kv_pages or job.pages
    enough = min(wanted, max(need.pages, -(-wanted * ENOUGH_ROWS // max(1, job.rows))))
    whole = model.tiles + model.embedding
    fits = wish.resident_bytes is None and whole + enough * model.page <= room
    if fits:
        ring, resident = 0, model.tiles
        pages = min(wanted, (room - whole) // model.page)
        embedding = True
    else:
        ring = wish.ring_bytes or _clamp(room // 10, 2 * model.largest_load, 12 * model.largest_load)
        room -= ring
        pages = max(need.pages, min(wanted, room // model.page))
        room = max(0, room - pages * model.page)
        embedding = model.embedding <= room
        room -= model.embedding if embedding else 0
        resident = room if wish.resident_bytes is None else wish.resident_bytes
    return MemoryPlan(
        token_budget=tokens,
        max_sequences=sequences,
        slice_tokens=min(tokens, wish.slice_tokens or LARGEST_SLICE),
        kv_pages=pages,
        ring_bytes=ring,
        resident_bytes=resident,
        embedding_resident=embedding,
        workspace_bytes=workspace,
        transient_bytes=transient,
        all_resident=fits,
    )


class _Need:
    """What a sweep of a given size takes."""

    def __init__(self, model: ModelSize, job: JobSize, wish: Overrides) -> None:
        self.model, self.job, self.wish = model, job, wish
        self.pages = wish.kv_pages or pages_for(job.longest_prompt + 1)

    def least(self) -> int:
        """Bytes of the smallest plan: the fewest tokens, one sequence, two loads in flight."""
        tokens = self.wish.token_budget or TOKEN_STEPS[0]
        ring = self.wish.ring_bytes or 2 * self.model.largest_load
        least = self.workspace(tokens, 1) + self.transient(tokens) + SEQUENCE_BYTES
        return least + ring + self.pages * self.model.page + (self.wish.resident_bytes or 0)

    def workspace(self, tokens: int, sequences: int) -> int:
        return self.model.activations.workspace_bytes(tokens, sequences)

    def transient(self, tokens: int) -> int:
        return self.model.activations.transient_bytes(min(tokens, self.wish.slice_tokens or LARGEST_SLICE))

    def token_budget(self, room: int) -> int:
        """Tokens of a sweep: as many as a sixth of the room holds, no more than the job has."""
        if self.wish.token_budget is not None:
            return self.wish.token_budget
        most = padded(max(self.job.prompt_tokens, self.job.rows, 1))
        best = TOKEN_STEPS[0]
        for step in TOKEN_STEPS:
            tokens = min(step, most)
            if self.workspace(tokens, 1) <= room // 6:
                best = max(best, tokens)
        return best

    def max_sequences(self, tokens: int, room: int) -> int:
        """Sequences at once: each decodes one token a sweep, and its logits have to fit."""
        most = min(self.wish.max_sequences or tokens, tokens, max(1, self.job.rows))
        for count in range(most, 1, -max(1, most // 64)):
            if self.workspace(tokens, count) <= max(self.workspace(tokens, 1), room // 6):
                return count
        return 1


def _clamp(value: int, low: int, high: int) -> int:
    return max(low, min(value, high))
