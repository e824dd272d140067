"""What is on its way: reads into host memory, and shipments of tiles, which a read or several carry."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import torch

from batchgen_lite.offload.arena import Arena
from batchgen_lite.offload.device_tier import Upload
from batchgen_lite.offload.read_ahead import Tier
from batchgen_lite.offload.readers.protocol import ReadPiece
from batchgen_lite.offload.ring import Grant
from batchgen_lite.offload.tiles import Tile


@dataclass(slots=True, eq=False)
class Load:
    """One submission to the reader: some tiles of one module, and where their extents lie in ``arena``."""

    tiles: tuple[Tile, ...]
    arena: Arena
    positions: dict[int, list[int]]  # id(tile) -> position of each extent
    grant: Grant | None  # None: resident memory
    ready: threading.Event = field(default_factory=threading.Event)
    error: BaseException | None = None

    def done(self, error: BaseException | None) -> None:
        self.error = error
        self.ready.set()

    def pieces(self) -> list[ReadPiece]:
        """What to ask the reader for, in file order, so that neighbours become one read."""
        placed = [
            (extent, position)
            for tile in self.tiles
            for extent, position in zip(tile.extents, self.positions[id(tile)], strict=True)
        ]
        placed.sort(key=lambda entry: (entry[0].file, entry[0].offset))
        return [
            ReadPiece(extent.file, extent.offset, extent.nbytes, self.arena.view, position)
            for extent, position in placed
        ]

    def parts(self, tile: Tile) -> list[torch.Tensor]:
        tensor = self.arena.tensor
        positions = self.positions[id(tile)]
        return [tensor[at : at + extent.nbytes] for at, extent in zip(positions, tile.extents, strict=True)]


@dataclass(slots=True, eq=False)
class Shipment:
    """Tiles of one module and tier that travel together to where they are computed with. ``sources``: the loads that
    carry them on the host, by id(tile); ``upload``: where they are on the device, once their copy is queued; ``held``:
    how many of them other threads compute with."""

    tiles: tuple[Tile, ...]
    sweep: int
    tier: Tier
    sources: dict[int, Load]
    upload: Upload | None = None
    held: int = 0

    def loads(self) -> list[Load]:
        return list(dict.fromkeys(self.sources.values()))
