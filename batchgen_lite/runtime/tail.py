"""The tail of a job: KV memory that no row can come to need any more becomes resident weights. Torch-free.

Memory is divided for the bulk of a job, where a byte of KV is worth more than a byte of resident weights: it makes the
batch larger. Once no row waits, nothing makes the batch larger. It only shrinks, and every sweep still reads all that
is streamed. So from then on the pages that the running rows can need, to the last token they may generate, are kept,
and the others' memory goes to weights, in steps as rows end. Nobody can run short by it, and no bit changes: resident
weights are the same bytes, and a page's contents are the same wherever it lies.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Protocol

from batchgen_lite.offload.pages import BlockTable, pages_for
from batchgen_lite.runtime.cost import SweepCost
from batchgen_lite.runtime.sequence import Sequence

STEP_SHARE = 0.1  # of the pool at first: a step frees this much, or STEP_BYTES if that is less
STEP_BYTES = 64 << 20


class TailMemory(Protocol):
    """Gives KV pages up for weights while a run goes on."""

    async def keep_pages(self, pages: int, tables: Seq[BlockTable]) -> None:
        """Between two sweeps: of the pool only ``pages`` pages are needed from now on; ``tables`` are all that hold
        any. Where giving up the others is worth it, tables are renumbered, and the pool's capacity is smaller."""
        ...


def pages_needed(running: Iterable[Sequence]) -> int:
    """Pages that hold every one of ``running`` to the last token it may generate, and those that it holds already."""
    return sum(
        max(len(sequence.table.pages), pages_for(len(sequence.tokens) + max(0, sequence.remaining)))
        for sequence in running
    )


def least_step(pages_at_first: int, page_bytes: float) -> int:
    """Pages that a step frees at least."""
    return max(1, round(min(STEP_SHARE * pages_at_first, STEP_BYTES / max(1.0, page_bytes))))


def keeping(cost: SweepCost, nbytes: float) -> SweepCost:
    """``cost`` with ``nbytes`` more of the streamed weights in memory, those first that every sweep needs."""
    dense = min(nbytes, cost.streamed_bytes)
    routed = min(nbytes - dense, cost.routed_bytes)
    return replace(
        cost,
        streamed_bytes=cost.streamed_bytes - dense,
        routed_bytes=cost.routed_bytes - routed,
        resident_bytes=cost.resident_bytes + dense + routed,
    )
