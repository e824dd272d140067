"""Which tiles stay in memory: a fixed set, spread evenly over the layers.

A sweep is a cyclic scan, the one access pattern for which recency tells nothing: a least-recently-used cache smaller
than the scan never hits. A fixed set of the same size always hits. Spreading it over the layers keeps the ratio of
reading to computing the same everywhere, so the read-ahead never runs dry in one stretch and idles in another. In the
tail of a job the set grows (runtime/tail.py), by the same order, and never shrinks before the job ends.

Where the device has memory of its own, two sets are chosen so, first what stays there, then what stays on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import zip_longest

from batchgen_lite.offload.readers.placement import place
from batchgen_lite.offload.tiles import Module, Tile


def choose_residents(
    modules: Sequence[Module], budget: int, alignment: int, *, without: Iterable[Tile] = ()
) -> list[Tile]:
    """Tiles of at most ``budget`` bytes of host memory in all, over-reads included, none of them in ``without``;
    everything that every sweep needs comes before experts, which a small sweep may not choose."""
    return choose_tiles(modules, budget, lambda tile: tile_footprint(tile, alignment), without)


def choose_tiles(
    modules: Sequence[Module], budget: int, size: Callable[[Tile], int], without: Iterable[Tile] = ()
) -> list[Tile]:
    """As ``choose_residents``, for memory in which a tile takes ``size`` bytes."""
    chosen = []
    taken = set(map(id, without))
    for tile in _by_merit(modules):
        nbytes = size(tile)
        if nbytes <= budget and id(tile) not in taken:
            chosen.append(tile)
            budget -= nbytes
    return chosen


def tile_footprint(tile: Tile, alignment: int) -> int:
    """Arena bytes that a tile takes when it is loaded by itself."""
    ordered = sorted(tile.extents, key=lambda extent: (extent.file, extent.offset))
    return place(ordered, 0, alignment).end


def _by_merit(modules: Sequence[Module]) -> Iterator[Tile]:
    for routed in (False, True):
        columns = [[tile for tile in module.tiles if module.routed == routed] for module in modules]
        for rank in zip_longest(*columns):
            yield from (tile for tile in rank if tile is not None)
