"""Shipments on their way from host to device memory: copies queued in order, host memory given back behind them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from batchgen_lite.offload.device_tier import DeviceTier
from batchgen_lite.offload.devices.protocol import Event
from batchgen_lite.offload.host_tier import HostTier
from batchgen_lite.offload.load import Load, Shipment
from batchgen_lite.offload.read_ahead import Tier
from batchgen_lite.offload.tiles import Tile
from batchgen_lite.trace.recorder import Recorder


class Uploads:
    """One owner, the engine's thread. ``needed``: whether a sweep needs a tile, as far as is known."""

    def __init__(
        self, device: DeviceTier, host: HostTier, needed: Callable[[Tile, int], bool], recorder: Recorder
    ) -> None:
        self.copied_bytes = 0  # copies that are done
        self._device, self._host, self._needed, self._recorder = device, host, needed, recorder
        self._waiting: deque[Shipment] = deque()  # in order of consumption; their copies are not queued
        self._copying: deque[tuple[Event, list[Load], float, int]] = deque()  # hold host memory until the event

    def add(self, shipment: Shipment) -> None:
        """``shipment`` is being read and is to be copied behind all that were added before."""
        self._waiting.append(shipment)

    def queue(self) -> bool:
        """Queue copies of what has been read, while the device's ring has room; whether anything moved."""
        moved = False
        while self._waiting:
            shipment = self._waiting[0]
            loads = shipment.loads()
            if any(not load.ready.is_set() or load.error is not None for load in loads):
                return moved
            # The router may have spoken since; what stays on the device is worth its copy all the same.
            stays = shipment.tier is Tier.DEVICE
            tiles = [tile for tile in shipment.tiles if stays or self._needed(tile, shipment.sweep)]
            if tiles:
                since = self._recorder.now()
                upload = self._device.upload(tiles, shipment.sources)
                if upload is None:
                    return moved
                shipment.upload = upload
                self._copying.append((upload.arrived, loads, since, sum(tile.nbytes for tile in tiles)))
            else:
                self._give_back(loads)
            self._waiting.popleft()
            moved = True
        return moved

    def pass_by(self, shipment: Shipment) -> None:
        """The consumer is done with ``shipment``, which has been read, or never wanted it."""
        if self._waiting and self._waiting[0] is shipment:
            self.queue()
        if self._waiting and self._waiting[0] is shipment:  # its read failed
            self._waiting.popleft()
            self._give_back(shipment.loads())
        if shipment.upload is not None:
            self._device.release(shipment.upload)

    def settle(self) -> None:
        """Give the host's room back behind copies that are done. Never blocks."""
        while self._copying and self._copying[0][0].done():
            self._settle_oldest()

    def settle_oldest(self) -> bool:
        """Wait for the oldest copy and give its room back; False where none is under way."""
        if not self._copying:
            return False
        self._copying[0][0].synchronize()
        self._settle_oldest()
        return True

    def _settle_oldest(self) -> None:
        _, loads, since, nbytes = self._copying.popleft()
        self.copied_bytes += nbytes
        self._recorder.copied(since, nbytes, inward=True)
        self._give_back(loads)

    def _give_back(self, loads: list[Load]) -> None:
        for load in loads:
            self._host.release(load)

    def drop(self) -> None:
        """Forget what waits and wait for what is being copied."""
        self._waiting.clear()
        while self.settle_oldest():
            pass
