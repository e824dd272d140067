"""Weights on their way into products: widened to fp32 stage by stage, and kept so where memory is left for it.

Decoding packed weights costs a sweep the same however few rows it carries. Where all of a model is resident and the
budget has room beside it, packed tiles stay in memory in fp32 as well, as many as fit, from their first use on. A stage
has the same bits and the same shape either way, so no result changes.

Floats of 16 bits are not kept: they widen as fast as they are read, and reading twice the bytes takes as long or longer
(a job with all of a model of 3.4 GB resident: 161 s with 6.3 GiB of copies, 159 s without).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch

from batchgen_lite.kernels.experts.reference import Stage, widened
from batchgen_lite.kernels.experts.stage_memory import StageMemory
from batchgen_lite.offload.arena import Arena
from batchgen_lite.offload.tiles import Tile

FLOAT = 4
CHEAP = frozenset({"F32", "F16", "BF16"})
"""Encodings that are not worth a copy in fp32."""


def cheap(tile: Tile) -> bool:
    """Whether the tile's weights widen about as fast as they are read, without memory to do it in. Matrices made of
    several have all their encodings' names."""
    return set(tile.matrix.encoding.split("+")) <= CHEAP


def widened_bytes(tiles: Iterable[Tile]) -> int:
    """Bytes that ``tiles`` take in fp32, those left out that gain nothing by it."""
    return sum(map(_bytes_of, tiles))


class WidenedTiles:
    """Gives tiles' stages; ``nbytes`` of memory hold those of the first tiles asked for. One thread at a time, except
    for ``cheap`` tiles."""

    def __init__(self, nbytes: int = 0) -> None:
        self._arena = Arena(nbytes) if nbytes else None
        self._free = nbytes
        self._kept: dict[int, tuple[Tile, list[Stage]]] = {}  # by the tile's id; the tile with it, so that it lives on

    def stages(
        self, tile: Tile, parts: Sequence[torch.Tensor], scratch: StageMemory, columns: int = 0
    ) -> Iterator[Stage]:
        """See kernels/experts/reference.py: widened; each stage is valid until the next one is asked for."""
        kept = self._kept.get(id(tile))
        if kept is not None:
            yield from kept[1]
            return
        stages = widened(tile.matrix, parts, (tile.start, tile.stop), scratch, columns)
        if not 0 < _bytes_of(tile) <= self._free:
            yield from stages
            return
        mine: list[Stage] = []
        free = self._free
        for start, stop, weights in stages:
            mine.append((start, stop, self._copy(weights, free)))
            free -= weights.nbytes
            yield mine[-1]
        self._free, self._kept[id(tile)] = free, (tile, mine)  # now: a sweep may be ended in the middle of a tile

    def _copy(self, weights: torch.Tensor, free: int) -> torch.Tensor:
        """``weights`` behind what is in use while ``free`` bytes are not."""
        assert self._arena is not None
        at = self._arena.nbytes - free
        return self._arena.tensor[at : at + weights.nbytes].view(torch.float32).view(weights.shape).copy_(weights)

    def close(self) -> None:
        """Give the memory back."""
        self._kept.clear()
        self._free = 0
        if self._arena is not None:
            self._arena.close()
            self._arena = None


def _bytes_of(tile: Tile) -> int:
    """In fp32; 0 where that gains nothing."""
    if cheap(tile):
        return 0
    matrix = tile.matrix
    return (tile.stop - tile.start) * matrix.outputs_per_row * matrix.cols * FLOAT
