"""Weights that are not a model's: tiles of its matrices, as large and encoded as they are, with made-up bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import lcm

import torch

from batchgen_lite.offload.held_tiles import HeldTile, last_tiles
from batchgen_lite.offload.tiles import ROW_STEP, SHARED_EXPERT, Module, Tile

MOST_ELEMENTS = 1 << 21
"""Weights of one matrix that a part of it holds at most, two stages of widening; more where it is to be read whole."""

EXPERTS = 2
"""Routed experts that a module is given at least, one behind the other as in a sweep."""

FILL = 0x3C
"""Harmless in every encoding: bf16 0.01, fp16 1.1, fp8 1.5. Zeros would be read from one page of memory, and random
bytes hold infinities and the denormal numbers that cores are slow with."""
FILL_E8M0 = 0x7F
"""The same where scales are powers of two, of which FILL would be 2^-67."""


@dataclass(frozen=True, slots=True)
class Part:
    """``tiles`` stand for some tiles of a module, which hold ``times`` as many weights."""

    tiles: tuple[Tile, ...] = ()
    times: float = 1.0

    @property
    def largest(self) -> int:
        """Bytes of the largest tile."""
        return max((tile.nbytes for tile in self.tiles), default=0)


def part_of(tiles: Sequence[Tile]) -> Part:
    """The first rows of every matrix that ``tiles``, each expert's in order, are cut from."""
    whole = sum(_elements(tile) for tile in tiles)
    first = {(tile.expert, tile.role): tile for tile in reversed(tiles)}
    cut = tuple(_cut(tile) for tile in tiles if first[tile.expert, tile.role] is tile)
    return Part(cut, whole / sum(_elements(tile) for tile in cut)) if cut else Part()


def _cut(tile: Tile) -> Tile:
    matrix = tile.matrix
    step = lcm(matrix.row_step, ROW_STEP)
    rows = max(step, MOST_ELEMENTS // (matrix.cols * matrix.outputs_per_row) // step * step)
    stop = min(tile.start + rows, tile.stop)
    return Tile(tile.module, tile.role, matrix, tile.start, stop, tile.expert, matrix.extents(tile.start, stop))


def _elements(tile: Tile) -> int:
    return (tile.stop - tile.start) * tile.matrix.outputs_per_row * tile.matrix.cols


class MadeUpTiles:
    """Implements TileSource. ``modules``: the model's; ``arena`` uint8: where weights are taken from in turn, so that
    the cores do not find them in their caches. A module has the tiles that it was last given, at first none."""

    def __init__(self, modules: Sequence[Module], arena: torch.Tensor, experts: int = EXPERTS) -> None:
        """``experts``: routed ones that a module is given at most."""
        self.modules = modules
        self.experts_given = 0  # routed ones, when tiles were last asked for
        self._arena, self._experts = arena, experts
        self._at = 0
        self._filled = 0
        self._given: dict[int, tuple[Tile, ...]] = {}

    def give(self, module: Module, tiles: Sequence[Tile]) -> None:
        """From now on these are the tiles of ``module``; of routed ones those of the first experts that are chosen."""
        self._given[module.index] = tuple(tiles)
        if tiles:
            fill = FILL_E8M0 if any("MXFP4" in tile.matrix.encoding for tile in tiles) else FILL
            if fill != self._filled:
                self._arena.fill_(fill)
                self._filled = fill

    def tiles(self, module: Module, counts: torch.Tensor | None = None) -> Iterator[tuple[Tile, list[torch.Tensor]]]:
        """See TileSource.tiles."""
        routed = [] if counts is None else counts.nonzero().flatten().tolist()[: self._experts]
        chosen = None if counts is None else {SHARED_EXPERT, *routed}
        self.experts_given = len(routed)
        for tile in self._given.get(module.index, ()):
            if chosen is None or tile.expert in chosen:
                yield tile, [self._take(extent.nbytes) for extent in tile.extents]

    def can_hold(self, module: Module) -> bool:
        """See TileSource.can_hold."""
        return True

    def held(
        self, module: Module, counts: torch.Tensor | None, idle_since: Callable[[], float | None]
    ) -> Iterator[HeldTile]:
        """See TileSource.held. Nothing is read, so all stay valid; those released are not waited for."""
        last = set(map(id, last_tiles(self._given.get(module.index, ()))))
        for tile, parts in self.tiles(module, counts):
            yield HeldTile(tile, parts, id(tile) in last, lambda _: None, lambda: 0.0)

    def _take(self, nbytes: int) -> torch.Tensor:
        if self._at + nbytes > self._arena.numel():
            self._at = 0
        begin, self._at = self._at, self._at + -(-nbytes // 64) * 64
        return self._arena[begin : begin + nbytes]
