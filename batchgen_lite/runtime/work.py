"""What passes between the engine and whoever runs its sweeps. Torch-free, so that runs can be simulated."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

from batchgen_lite.offload.pages import PAGE_TOKENS, PageAllocator
from batchgen_lite.runtime.cost import SweepLoad, page_visits
from batchgen_lite.runtime.interface import SampledToken, SequenceRequest
from batchgen_lite.runtime.scheduler import Limits
from batchgen_lite.runtime.sequence import Sequence


class SweepAborted(Exception):
    """The sweep was told to stop; nothing of it has been committed."""


class Work:
    """One span of a sweep. ``wants_logits``: it reaches the sequence's last token, so a token is to be sampled."""

    __slots__ = ("count", "request", "sequence", "start", "wants_logits")

    def __init__(self, sequence: Sequence, request: SequenceRequest, start: int, count: int) -> None:
        self.sequence = sequence
        self.request = request
        self.start = start
        self.count = count
        self.wants_logits = start + count == len(sequence.tokens)


def load_of(work: Seq[Work], group: int) -> SweepLoad:
    """What a sweep carries, as the cost model counts it; ``group`` query heads share a KV head."""
    tokens, sampled, visits = 0, 0, 0.0
    for item in work:
        tokens += item.count
        sampled += item.wants_logits
        visits += page_visits(item.start, item.count, group, PAGE_TOKENS)
    return SweepLoad(tokens, sampled, visits)


@dataclass(frozen=True, slots=True)
class PageChanges:
    """Pages reserved for this sweep: ``fresh`` ones, and (source, destination) ``copies`` of shared ones."""

    fresh: Seq[int]
    copies: Seq[tuple[int, int]]


class SweepRunner(Protocol):
    """Carries out sweeps: the real one on a device, a simulated one on a virtual clock."""

    allocator: PageAllocator

    def limits(self) -> Limits:
        """What one sweep may hold at present; may shrink after a sweep raised MemoryError."""
        ...

    async def run(self, work: Seq[Work], changes: PageChanges) -> list[SampledToken | None]:
        """Compute the spans; a token for every span that wants logits, else None, in order.

        Raises SweepAborted after ``abort``, MemoryError when the sweep was too large (the limits are then smaller),
        StorageError when a read failed. After any exception nothing of the sweep counts.
        """
        ...

    def abort(self) -> None:
        """From any thread: end the sweep in flight soon, and let every later one raise SweepAborted."""
        ...
