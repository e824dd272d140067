"""Weights in device memory: tiles that stay there, and a ring through which the others pass on their way from the host.

Only copies that an event orders touch device memory, and nobody waits for them but the lane that has to:

    copy into the ring     behind the compute that last read what lay there (an event recorded when room was given back)
    compute on an upload   behind the upload's copy
    host memory reused     by the stream, when the host has seen the copy's event (``Upload.arrived``)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from batchgen_lite.offload.devices.protocol import Device, DeviceMemory, Event, Lane
from batchgen_lite.offload.ring import Grant, Ring
from batchgen_lite.offload.tiles import Tile

if TYPE_CHECKING:
    from batchgen_lite.offload.load import Load

ALIGNMENT = 256  # of every extent in device memory: kernels load as wide as they can


@dataclass(slots=True, eq=False)
class Upload:
    """Some tiles of one module, and where their extents lie in ``memory``; there once ``arrived`` has come."""

    memory: DeviceMemory
    positions: dict[int, list[int]]  # id(tile) -> position of each extent
    grant: Grant | None  # None: resident memory
    arrived: Event
    awaited: bool = field(default=False)  # whether compute has been told to wait for it

    def parts(self, tile: Tile) -> list[torch.Tensor]:
        """One uint8 tensor on the device per extent of ``tile``."""
        tensor = self.memory.tensor
        positions = self.positions[id(tile)]
        return [tensor[at : at + extent.nbytes] for at, extent in zip(positions, tile.extents, strict=True)]


def device_footprint(tile: Tile) -> int:
    """Bytes of device memory that ``tile`` takes."""
    return sum(_aligned(extent.nbytes) for extent in tile.extents)


class DeviceTier:
    """One owner, the engine's thread. ``ring`` lies in memory of ``device``; None: everything is resident."""

    def __init__(self, device: Device, ring: Ring[DeviceMemory] | None, resident: Iterable[Tile]) -> None:
        self.device, self.ring = device, ring
        self._place: dict[int, int] = {}  # id of a resident tile -> where it will lie
        free = 0
        for tile in resident:
            self._place[id(tile)] = free
            free += device_footprint(tile)
        self._memory = device.allocate(free) if free else None
        self._uploads: dict[int, Upload] = {}  # id of a resident tile -> its upload, once queued
        self._used: deque[tuple[int, int, Event]] = deque()  # stretches of the ring given back, oldest first
        self.resident_bytes = 0
        self.copied_bytes = 0

    def keeps(self, tile: Tile) -> bool:
        """Whether ``tile`` stays on the device."""
        return id(tile) in self._place

    def resident(self, tile: Tile) -> Upload | None:
        """The upload of a resident tile that has been queued."""
        return self._uploads.get(id(tile))

    def upload(self, tiles: Sequence[Tile], sources: dict[int, Load]) -> Upload | None:
        """Queue copies of ``tiles``, all of them residents or none, out of the loads that carry them, by id(tile), and
        that have been read; None while the ring has no room."""
        grant = None
        if self.keeps(tiles[0]):
            assert self._memory is not None
            memory, positions = self._memory, {id(tile): self._layout(tile, self._place[id(tile)]) for tile in tiles}
        else:
            assert self.ring is not None, "a tile that does not stay on the device, without a ring there"
            grant = self.ring.grant(sum(device_footprint(tile) for tile in tiles))
            if grant is None:
                return None
            memory, positions = self.ring.arena, {}
            at = grant.start
            for tile in tiles:
                positions[id(tile)] = self._layout(tile, at)
                at += device_footprint(tile)
            self._wait_for_readers(grant)
        try:
            arrived = self.device.copy(Lane.COPY_IN, _pairs(tiles, sources, memory.tensor, positions))
        except BaseException:
            if grant is not None and self.ring is not None:
                self.ring.release(grant)
            raise
        upload = Upload(memory, positions, grant, arrived)
        nbytes = sum(tile.nbytes for tile in tiles)
        self.copied_bytes += nbytes
        if grant is None:
            self.resident_bytes += nbytes
            self._uploads |= dict.fromkeys(map(id, tiles), upload)
        return upload

    def use(self, upload: Upload) -> None:
        """Compute that is queued from now on reads ``upload``."""
        if not upload.awaited:
            self.device.wait(Lane.COMPUTE, upload.arrived)
            upload.awaited = True

    def release(self, upload: Upload) -> None:
        """All compute that reads ``upload`` has been queued: its room in the ring may be filled behind that."""
        if upload.grant is None or upload.grant.released:
            return
        assert self.ring is not None
        start = upload.grant.start
        self._used.append((start, start + upload.grant.nbytes, self.device.record(Lane.COMPUTE)))
        self.ring.release(upload.grant)

    def _wait_for_readers(self, grant: Grant) -> None:
        """Let copies wait for the last compute that read the stretch. Waiting for the newest release of all instead
        would be simpler, and would never copy while the present tile is computed with."""
        start, end = grant.start, grant.start + grant.nbytes
        latest = None
        kept: deque[tuple[int, int, Event]] = deque()
        for stretch in self._used:
            if stretch[0] < end and start < stretch[1]:
                latest = stretch[2]  # the compute lane is in order: the last one stands for all
                # What the grant does not cover keeps its event.
                if stretch[0] < start:
                    kept.append((stretch[0], start, stretch[2]))
                if end < stretch[1]:
                    kept.append((end, stretch[1], stretch[2]))
            else:
                kept.append(stretch)
        self._used = kept
        if latest is not None:
            self.device.wait(Lane.COPY_IN, latest)

    @staticmethod
    def _layout(tile: Tile, at: int) -> list[int]:
        positions = []
        for extent in tile.extents:
            positions.append(at)
            at += _aligned(extent.nbytes)
        return positions

    def close(self) -> None:
        """Give the residents' memory back; the ring is its owner's. No lane may still use it."""
        self._uploads.clear()
        if self._memory is not None:
            self._memory.close()
            self._memory = None


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _pairs(
    tiles: Sequence[Tile], sources: dict[int, Load], target: torch.Tensor, positions: dict[int, list[int]]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(source, destination) of every extent; neighbours on both sides become one copy."""
    merged: list[tuple[Load, int, int, int]] = []  # load, source position, target position, bytes
    for tile in tiles:
        load = sources[id(tile)]
        for extent, source, at in zip(tile.extents, load.positions[id(tile)], positions[id(tile)], strict=True):
            if merged:
                last, begin, to, nbytes = merged[-1]
                if last is load and begin + nbytes == source and to + nbytes == at:
                    merged[-1] = (load, begin, to, nbytes + extent.nbytes)
                    continue
            merged.append((load, source, at, extent.nbytes))
    return [
        (load.arena.tensor[source : source + nbytes], target[at : at + nbytes]) for load, source, at, nbytes in merged
    ]
