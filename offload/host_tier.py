"""Weights in host memory: tiles that stay there, and a ring through which the others pass on their way from the disk.

Resident tiles are read once, on first use, into memory of their own, and never again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from batchgen_lite.offload.arena import Arena
from batchgen_lite.offload.load import Load
from batchgen_lite.offload.readers.placement import place
from batchgen_lite.offload.readers.protocol import Reader
from batchgen_lite.offload.ring import Ring
from batchgen_lite.offload.tiles import Tile


@dataclass(slots=True)
class Shelf:
    """Memory of residents; what lies before ``free`` is taken."""

    arena: Arena
    free: int = 0


class HostTier:
    """One owner, the engine's thread; reads complete on the reader's threads, which only set a load's event."""

    def __init__(
        self,
        reader: Reader,
        ring: Ring[Arena] | None,
        resident: Iterable[Tile],
        sizes: dict[int, int],
        memory: Callable[[int], Arena] = Arena,
    ) -> None:
        """``ring`` None: nothing streams. ``sizes``: bytes that each tile takes, by id; ``memory`` gives the residents'
        arena: address space whose pages are touched when they are read."""
        self.ring = ring
        self._reader = reader
        self._sizes, self._memory = sizes, memory
        self._resident: dict[int, Tile] = {}
        self._loads: dict[int, Load] = {}  # id of a resident tile -> where it lies, once submitted
        self._shelves: list[Shelf] = []  # reads go to the last one
        self.resident_bytes = 0
        self.keep(list(resident))
        self._at_first = dict(self._resident)
        self._shelves_at_first = len(self._shelves)

    def keeps(self, tile: Tile) -> bool:
        """Whether ``tile`` stays in host memory."""
        return id(tile) in self._resident

    def resident(self, tile: Tile) -> Load | None:
        """The load of a resident tile that has been submitted."""
        return self._loads.get(id(tile))

    def keep(self, tiles: Sequence[Tile]) -> None:
        """From their next read on, ``tiles`` stay, too. Raises BudgetError, changing nothing, where the operating
        system refuses the memory."""
        fresh = {id(tile): tile for tile in tiles}
        if not fresh:
            return
        # Residents not read yet may come in one read with new ones, so they move along to the new shelf. The room that
        # they leave on the old one has never been touched.
        unread = [key for key in self._resident if key not in self._loads]
        footprint = sum(self._sizes[key] for key in (*unread, *fresh))
        if footprint:
            self._shelves.append(Shelf(self._memory(footprint)))
        self._resident |= fresh

    def keep_no_more(self) -> None:
        """Only what was resident at first stays; the memory of the rest goes back."""
        late = self._shelves[self._shelves_at_first :]
        del self._shelves[self._shelves_at_first :]
        arenas = {id(shelf.arena) for shelf in late}
        for load in self._loads.values():
            load.ready.wait()  # a failed read may have been begun anew
        # One that was resident at first may lie on a later shelf: it will be read again, its room is still there.
        self._loads = {key: load for key, load in self._loads.items() if id(load.arena) not in arenas}
        self._resident = dict(self._at_first)
        self.resident_bytes = sum(self._resident[key].nbytes for key in self._loads)
        for shelf in late:
            shelf.arena.close()

    def fetch(self, tiles: Sequence[Tile]) -> Load | None:
        """Begin to read ``tiles``, all of them residents or none; None while the ring has no room."""
        order = sorted(
            ((extent, tile, i) for tile in tiles for i, extent in enumerate(tile.extents)),
            key=lambda entry: (entry[0].file, entry[0].offset),
        )
        placement = place([extent for extent, _, _ in order], 0, self._reader.alignment)
        grant = None
        stays = self.keeps(tiles[0])
        if stays:
            shelf = self._shelves[-1]
            arena, start = shelf.arena, shelf.free
        else:
            assert self.ring is not None, "a streamed tile without a ring"
            grant = self.ring.grant(placement.end)
            if grant is None:
                return None
            arena, start = self.ring.arena, grant.start
        positions: dict[int, list[int]] = {id(tile): [0] * len(tile.extents) for tile in tiles}
        for (_, tile, i), position in zip(order, placement.positions, strict=True):
            positions[id(tile)][i] = start + position
        load = Load(tuple(tiles), arena, positions, grant)
        if stays:
            shelf.free = start + placement.end
            self.resident_bytes += sum(tile.nbytes for tile in tiles)
            for tile in tiles:
                self._loads[id(tile)] = load
        self._reader.submit(load.pieces(), load.done)
        return load

    def release(self, load: Load) -> None:
        """Give the load's room in the ring back, after the read has ended; a resident one keeps its own."""
        load.ready.wait()  # never hand out memory that a read still writes to
        if load.grant is not None and not load.grant.released:
            assert self.ring is not None
            self.ring.release(load.grant)

    def retry_failed(self) -> None:
        """Residents whose read failed are read again."""
        for load in set(self._loads.values()):
            load.ready.wait()
            if load.error is not None:
                load.ready.clear()
                self._reader.submit(load.pieces(), load.done)

    def close(self) -> None:
        """Wait for residents' reads and give their memory back; the ring is its owner's."""
        for load in self._loads.values():
            load.ready.wait()
        self._loads.clear()
        for shelf in self._shelves:
            shelf.arena.close()
        self._shelves.clear()
