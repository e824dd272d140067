"""Where extents must lie in an arena so that direct reads can write them in place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from batchgen_lite.offload.checkpoint.tensors import Extent


@dataclass(frozen=True, slots=True)
class Placement:
    """``positions[i]`` is extent i's first byte in the arena; ``end`` the first free byte behind all, aligned."""

    positions: tuple[int, ...]
    end: int


def place(extents: Sequence[Extent], start: int, alignment: int) -> Placement:
    """Lay extents out from ``start`` (a multiple of ``alignment``; the arena's base address must be one, too).

    An extent that continues the one before it in the file continues it in memory, so that both become one read; any
    other starts in a block of its own, ``offset % alignment`` bytes into it. The result's ``end - start`` is the
    memory needed, over-reads included.
    """
    positions: list[int] = []
    free = start
    before: Extent | None = None
    for extent in extents:
        if before is not None and before.file == extent.file and before.offset + before.nbytes == extent.offset:
            position = positions[-1] + before.nbytes
        else:
            position = free + extent.offset % alignment
        positions.append(position)
        free = -(-(position + extent.nbytes) // alignment) * alignment
        before = extent
    return Placement(tuple(positions), free)
