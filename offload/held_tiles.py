"""Tiles that several threads compute with at a time, and the reads whose room waits for them.

A read's room in the ring goes back when the last of its tiles has been released, in whatever order that happens. The
owner's thread gives it back, and is woken for nothing else: waking it for every tile was a fifth of the time that
the threads which compute held the interpreter's lock.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from batchgen_lite.offload.load import Shipment
from batchgen_lite.offload.tiles import SHARED_EXPERT, Module, Tile


@dataclass(slots=True)
class HeldTile:
    """A tile that stays valid until ``release``, whichever thread calls it. ``last``: of its expert."""

    tile: Tile
    parts: list[torch.Tensor]
    last: bool
    _released: Callable[[float], None]
    _now: Callable[[], float]
    _since: float = 0.0

    def begin(self) -> None:
        """Its computing begins now; for the recorder."""
        self._since = self._now()

    def release(self) -> None:
        """It is not needed any more."""
        self._released(self._since or self._now())


def last_tiles(tiles: Sequence[Tile]) -> list[Tile]:
    """Of every expert the last one, in the order of ``tiles``."""
    return list({tile.expert: tile for tile in tiles}.values())


def largest_expert(module: Module, sizes: dict[int, int]) -> int:
    """Bytes of all tiles of the largest routed expert of ``module``; ``sizes``: by a tile's id. 0 without experts."""
    experts: dict[int, int] = {}
    for tile in module.tiles:
        if tile.expert != SHARED_EXPERT:
            experts[tile.expert] = experts.get(tile.expert, 0) + sizes[id(tile)]
    return max(experts.values(), default=0)


class Holds:
    """How many tiles are held. ``release`` gives a shipment's room back. One thread calls everything but
    ``returned``."""

    def __init__(self, release: Callable[[Shipment], None]) -> None:
        self.count = 0
        self._release = release
        self._lock = threading.Lock()  # of ``count`` and every shipment's ``held``
        # Shipments of which nothing is held any more, or has not been yet; None: nothing at all is held.
        self._returned: queue.SimpleQueue[Shipment | None] = queue.SimpleQueue()
        self._leaving: list[Shipment] = []  # passed by, with tiles still held

    @property
    def block_room(self) -> bool:
        """Whether room would come back with them."""
        return bool(self._leaving)

    def hold(self, shipment: Shipment | None) -> None:
        """One tile more is held, which came with ``shipment``; None where it stays in memory."""
        with self._lock:
            self.count += 1
            if shipment is not None:
                shipment.held += 1

    def returned(self, shipment: Shipment | None) -> None:
        """From any thread: one tile is not held any more."""
        with self._lock:
            self.count -= 1
            if shipment is not None:
                shipment.held -= 1
            none, whole = not self.count, shipment is not None and not shipment.held
        if whole or none:
            self._returned.put(shipment if whole else None)

    def leave(self, shipment: Shipment) -> None:
        """``shipment`` has been passed by: its room goes back, now or when the last of its tiles is released."""
        with self._lock:
            if shipment.held:
                self._leaving.append(shipment)
                return
        self._release(shipment)

    def take_back(self) -> None:
        """What has been released by now."""
        while not self._returned.empty():
            self._taken(self._returned.get())

    def wait(self, seconds: float | None = None) -> bool:
        """Until all tiles of one more shipment are released, or all there are, or for so long: whether they were."""
        try:
            self._taken(self._returned.get(timeout=seconds))
        except queue.Empty:
            return False
        return True

    def _taken(self, shipment: Shipment | None) -> None:
        if shipment is None or shipment.held or shipment not in self._leaving:  # held again since, or still to come
            return
        self._leaving.remove(shipment)
        self._release(shipment)

    def drop(self) -> list[Shipment]:
        """Nothing is held any more, all has been released: the shipments whose room has not gone back."""
        left, self._leaving = self._leaving, []
        self.count, self._returned = 0, queue.SimpleQueue()
        return left
