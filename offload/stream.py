"""Weights on their way: a stream of tiles in sweep order, read ahead across modules, layers and sweeps.

The consumer (the engine thread) walks through a sweep's modules and asks for each one's tiles. The producer runs ahead
of it: whenever room in a ring becomes free it submits the next read or queues the next copy, so the links stay busy
while the consumer computes. There is no producer thread. ``pump`` submits whatever fits, and is called wherever room or
knowledge appears: when a shipment has been consumed, when a router has spoken, when a sweep begins. Reads complete on
the reader's threads, which do nothing but set the load's event. What to bring next is read_ahead.py's affair.

    disk ── read ──> host ring ── copy ──> device ring ──> compute          (a tile that stays nowhere)
                     host memory ─ copy ─> device ring ──> compute          (one that stays in host memory, read once)
                     host ring ── copy ──> device memory ──> compute        (one that stays on the device, copied once)

On a device that computes in host memory (the CPU) the copies and the second ring fall away.

Both rings are granted strictly in the order of consumption, which is what keeps them from deadlock: what compute waits
for is always the oldest shipment, and everything before it has been given back. Room in the host's ring is given back
when the host has seen the copy's event, for readers know nothing of lanes; room in the device's ring when compute has
been queued, for the next copy waits for that on its lane (device_tier.py).
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from batchgen_lite.errors import StorageError
from batchgen_lite.offload.arena import Arena
from batchgen_lite.offload.device_tier import DeviceTier, Upload, device_footprint
from batchgen_lite.offload.held_tiles import HeldTile, Holds, largest_expert, last_tiles
from batchgen_lite.offload.host_tier import HostTier
from batchgen_lite.offload.load import Load, Shipment
from batchgen_lite.offload.read_ahead import ReadAhead, Tier
from batchgen_lite.offload.readers.protocol import Reader
from batchgen_lite.offload.residents import tile_footprint
from batchgen_lite.offload.ring import Ring
from batchgen_lite.offload.stream_statistics import StreamStatistics
from batchgen_lite.offload.tiles import SHARED_EXPERT, Module, Tile
from batchgen_lite.offload.uploads import Uploads
from batchgen_lite.trace.recorder import SILENT, Recorder

LOAD_BYTES = 8 << 20  # tiles travel together up to about this size: fewer, larger reads
LOAD_BYTES_TO_DEVICE = 32 << 20  # there several experts share a launch, which costs the host some 0.1 ms
HELD_WAIT = 0.002  # seconds after which room is looked for again while a read is waited for and tiles are held
LOADS_IN_RING = 4  # at least so many loads fit the ring at once, unless single tiles are larger

Parts = list[torch.Tensor]
"""One uint8 tensor per extent of a tile."""


class StreamAborted(Exception):
    """The consumer was told to stop."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Consecutive tiles of a module that are in one memory (uint8) now, each with its parts, which lie in it.
    ``shipment``: what brought them, None where they stay."""

    memory: torch.Tensor
    tiles: Sequence[tuple[Tile, Parts]]
    resident: bool
    shipment: Shipment | None = None


class WeightStream:
    """Tiles of ``modules`` in order, sweep after sweep. One consumer thread calls everything but ``abort``."""

    def __init__(
        self,
        modules: Sequence[Module],
        reader: Reader,
        ring: Ring[Arena] | None,
        resident: Iterable[Tile] = (),
        recorder: Recorder = SILENT,
        device: DeviceTier | None = None,
    ) -> None:
        """``resident`` tiles stay in host memory; all others pass through ``ring`` (None if there are none).
        ``device``: the tier that tiles are computed from, None where that is the host's own."""
        self.modules = tuple(modules)
        self.statistics = StreamStatistics()
        self._recorder = recorder
        tiles = [tile for module in self.modules for tile in module.tiles]
        sizes = {id(tile): tile_footprint(tile, reader.alignment) for tile in tiles}
        self._host = HostTier(reader, ring, resident, sizes, Arena if device is None else device.device.host_memory)
        self._device = device
        capacities = [ring.capacity] if ring is not None else []
        together = LOAD_BYTES if device is None else LOAD_BYTES_TO_DEVICE
        if device is not None:
            sizes = {id(tile): max(sizes[id(tile)], device_footprint(tile)) for tile in tiles}
            capacities += [device.ring.capacity] if device.ring is not None else []
        most = min([together, *(capacity // LOADS_IN_RING for capacity in capacities)])
        self._ahead = ReadAhead(self.modules, self._tier, self._here, sizes, most)
        self._in_flight: deque[Shipment] = deque()  # in order of consumption
        self._settling: set[int] = set()  # ids of tiles in flight that will stay on the device
        self._holds = Holds(lambda shipment: self._give_back(shipment.loads()[0]))
        self._full = False  # the host's ring had no room for what is next, and nothing has changed since
        self._idle_since: Callable[[], float | None] | None = None  # of who holds tiles, see ``held``
        room = capacities[0] // LOADS_IN_RING if capacities else sum(sizes.values())
        fitting = (module.index for module in self.modules if largest_expert(module, sizes) <= room)
        self._holdable = frozenset(fitting if device is None else ())
        self._last = {id(tile) for module in self.modules for tile in last_tiles(module.tiles)}
        self._uploads = None if device is None else Uploads(device, self._host, self._ahead.needed, recorder)
        self._abort = threading.Event()

    def _tier(self, tile: Tile) -> Tier:
        if self._device is not None and self._device.keeps(tile):
            return Tier.DEVICE
        return Tier.HOST if self._host.keeps(tile) else Tier.DISK

    def _here(self, tile: Tile) -> bool:
        """Whether the tile is where it is computed with, for good, or on its way there."""
        if self._device is None:
            return self._host.resident(tile) is not None
        return self._device.resident(tile) is not None or id(tile) in self._settling

    # -- sweeps ---------------------------------------------------------------------------------------------------

    def begin_sweep(self, tokens: int, last: int | None = None) -> None:
        """A sweep over ``tokens`` tokens begins, ``last`` of them in the last layer's feed-forward network (None =
        all); its modules will be asked for in order."""
        self._ahead.begin_sweep(tokens, last)
        self._full = False
        self.pump()

    def abort(self) -> None:
        """From any thread: make the consumer raise StreamAborted at its next tile, and ever after until ``rearm``."""
        self._abort.set()

    def rearm(self) -> None:
        """Forget an earlier ``abort``."""
        self._abort.clear()

    def reset(self) -> None:
        """After a sweep has ended early: drop everything in flight and start over before a sweep's first module.
        Residents whose read failed are read again."""
        self._host.retry_failed()
        self._drop_in_flight()
        self._ahead.restart()

    def keep(self, tiles: Sequence[Tile]) -> None:
        """Between sweeps: from their next read on, ``tiles`` stay in host memory as well. They are read when a sweep
        needs them, as ever, so that nothing is read for it. Raises BudgetError, and changes nothing, where the
        operating system refuses the memory."""
        self._host.keep(tiles)
        self._ahead.tiers_changed()
        self._full = False  # what is next may go elsewhere now

    def keep_no_more(self) -> None:
        """Between sweeps: what ``keep`` added streams again, and its memory goes back to the operating system."""
        self.reset()
        self._host.keep_no_more()
        self.statistics.resident_bytes = self._host.resident_bytes

    def _drop_in_flight(self) -> None:
        if self._uploads is not None:
            self._uploads.drop()
        for shipment in (*self._holds.drop(), *self._in_flight):
            for load in shipment.loads():
                self._give_back(load)
            if shipment.upload is not None and self._device is not None:
                self._device.release(shipment.upload)
        self._in_flight.clear()
        self._settling.clear()

    # -- the consumer's side --------------------------------------------------------------------------------------

    def tiles(self, module: Module, counts: torch.Tensor | None = None) -> Iterator[tuple[Tile, Parts]]:
        """The tiles of ``module`` in order, each with one uint8 tensor per extent, valid until the next is asked for.

        ``counts``: for a routed module, tokens per expert [E]; tiles of experts without tokens are left out.
        Raises StreamAborted after ``abort`` and StorageError when a read failed.
        """
        for batch in self._batches(module, counts):
            for tile, parts in batch.tiles:
                if self._abort.is_set():
                    raise StreamAborted
                since = self._recorder.now()
                yield tile, parts
                self._recorder.tile(module.kind, module.layer, tile.expert, tile.nbytes, since, resident=batch.resident)

    def can_hold(self, module: Module) -> bool:
        """Whether all tiles of one of its experts may be held at once, with room in the ring for what comes next."""
        return module.index in self._holdable

    def held(
        self, module: Module, counts: torch.Tensor | None, idle_since: Callable[[], float | None]
    ) -> Iterator[HeldTile]:
        """As ``tiles``, each valid until it is released, from any thread; for those who compute with several at a time.
        All have been released when the iteration ends; where it ends early they have to be before the next call.

        ``idle_since``: the reading of time.perf_counter since which nothing has been computed, None while something
        is: only without computing does waiting for a read count as waiting."""
        self._idle_since = idle_since
        try:
            for batch in self._batches(module, counts):
                for tile, parts in batch.tiles:
                    if self._abort.is_set():
                        raise StreamAborted
                    self._holds.hold(batch.shipment)
                    released = partial(self._released, module, tile, batch)
                    yield HeldTile(tile, parts, id(tile) in self._last, released, self._recorder.now)
        finally:
            self._idle_since = None
        while self._holds.count:
            self._holds.wait()
            self.pump()

    def _released(self, module: Module, tile: Tile, batch: Batch, since: float) -> None:
        """On any thread."""
        self._recorder.tile(module.kind, module.layer, tile.expert, tile.nbytes, since, resident=batch.resident)
        self._holds.returned(batch.shipment)

    def batches(self, module: Module, counts: torch.Tensor | None = None) -> Iterator[Batch]:
        """As ``tiles``, as many at a time as are in one memory: for kernels that take several experts at once. Valid,
        for compute that is queued before the next is asked for."""
        for batch in self._batches(module, counts):
            since = self._recorder.now()
            yield batch
            for tile, _ in batch.tiles:
                self._recorder.tile(module.kind, module.layer, tile.expert, tile.nbytes, since, resident=batch.resident)
                since = self._recorder.now()

    def _batches(self, module: Module, counts: torch.Tensor | None) -> Iterator[Batch]:
        wanted: Sequence[Tile] = module.tiles
        if module.routed:
            assert counts is not None, "a routed module needs the router's counts"
            chosen = self._ahead.route(module, counts)
            self._full = False  # what is next may be less now
            if self._recorder.active:
                self._recorder.routed(module.layer, counts.tolist())
            self.pump()
            wanted = [tile for tile in module.tiles if tile.expert == SHARED_EXPERT or tile.expert in chosen]
        at = 0
        while at < len(wanted):
            batch = self._batch(wanted, at)
            yield batch
            at += len(batch.tiles)
        self._retire(module)

    def _batch(self, wanted: Sequence[Tile], at: int) -> Batch:
        """The tiles from ``at`` on that are there together, after giving back the room of everything before them."""
        home = self._host if self._device is None else self._device
        tile = wanted[at]
        shipment = None
        while (there := home.resident(tile)) is None:
            shipment = self._shipment_of(tile)
            if shipment is not None:
                there = self._arrive(shipment)
                break
        else:
            if isinstance(there, Load):
                self._wait(there)
        taken = []
        for tile in wanted[at:]:
            if shipment is None and home.resident(tile) is not there:
                break
            if shipment is not None and id(tile) not in there.positions:
                break
            taken.append((tile, there.parts(tile)))
        if isinstance(there, Upload):
            assert self._device is not None
            self._device.use(there)
            return Batch(there.memory.tensor, taken, there.grant is None)
        return Batch(there.arena.tensor, taken, there.grant is None, shipment)

    def _shipment_of(self, tile: Tile) -> Shipment | None:
        """The shipment that carries ``tile``, if it is the oldest; None when things have moved and are to be looked at
        again."""
        if not self._in_flight:
            self.pump()
            if self._holds.block_room and not self._in_flight and not self._here(tile):
                self._wait_for_held()
            elif not self._in_flight and not self._here(tile):
                # The host's ring may be full of copies under way: the one thing that the host has to wait for.
                if self._uploads is None or not self._uploads.settle_oldest():
                    raise RuntimeError(f"tile {tile.start}:{tile.stop} of module {tile.module} was never asked for")
                self.pump()
            return None
        if id(tile) in self._in_flight[0].sources:
            return self._in_flight[0]
        self._release(self._in_flight.popleft())
        return None

    def _wait_for_held(self) -> None:
        """The ring is full of tiles that are still computed with: until one is not."""
        while not self._abort.is_set() and not self._holds.wait(0.05):
            pass
        if self._abort.is_set():
            raise StreamAborted
        self.pump()

    def _arrive(self, shipment: Shipment) -> Load | Upload:
        """Wait until the tiles are in host memory and, where that is not where they are computed from, their copy is
        queued."""
        loads = shipment.loads()
        for load in loads:
            self._wait(load)
        if self._device is None:
            return loads[0]
        self.pump()
        assert shipment.upload is not None, "room for the oldest shipment is always there"
        return shipment.upload

    def _wait(self, load: Load) -> None:
        if not load.ready.is_set():
            started, since = time.perf_counter(), self._recorder.now()
            while not load.ready.wait(HELD_WAIT if self._holds.count else 0.05):
                if self._abort.is_set():
                    break
                if self._holds.count:
                    self.pump()
            idle = started if self._idle_since is None else self._idle_since()
            if idle is not None:
                computing = max(0.0, idle - started)
                self.statistics.wait_seconds += time.perf_counter() - started - computing
                self._recorder.waited(since + computing)
        if self._abort.is_set():
            raise StreamAborted
        if load.error is not None:
            if isinstance(load.error, StorageError):
                raise load.error
            raise StorageError(f"reading the checkpoint failed: {load.error}") from load.error

    def _retire(self, module: Module) -> None:
        """Give back whatever of ``module`` is still in flight: the tile just consumed, and experts nobody chose."""
        while self._in_flight and self._in_flight[0].tiles[0].module == module.index:
            self._release(self._in_flight.popleft())
        self.pump()

    def _release(self, shipment: Shipment) -> None:
        for load in shipment.loads():
            load.ready.wait()
        if self._uploads is not None:
            self._uploads.pass_by(shipment)
            self._settling.difference_update(map(id, shipment.tiles))
        else:
            self._holds.leave(shipment)
        self._count(shipment)
        self.pump()

    def _count(self, shipment: Shipment) -> None:
        module = self.modules[shipment.tiles[0].module]
        if not module.routed or shipment.tier is not Tier.DISK:
            return
        chosen = self._ahead.chosen(module)
        begun = {tile.expert for tile in shipment.tiles if tile.role == "gate_up" and tile.start == 0}
        begun.discard(SHARED_EXPERT)
        self.statistics.expert_reads += len(begun & chosen)
        self.statistics.unrouted_expert_reads += len(begun - chosen)

    # -- the producer's side --------------------------------------------------------------------------------------

    def pump(self) -> None:
        """Submit the next reads and queue the next copies, in order, for as long as there is room and it is known what
        to bring."""
        self._holds.take_back()
        if self._full and self._uploads is None:
            return
        moved = True
        while moved:
            if self._uploads is not None:
                self._uploads.settle()
                self.statistics.copied_bytes = self._uploads.copied_bytes
            while (group := self._ahead.peek()) is not None and self._send(*group):
                self._ahead.take()
            moved = self._uploads is not None and self._uploads.queue()
        self.statistics.router_wait_modules = self._ahead.waited_modules
        self.statistics.read_ahead_modules = self._ahead.ahead_modules

    def _send(self, sweep: int, tiles: tuple[Tile, ...]) -> bool:
        """Put ``tiles`` on their way; False while the host's ring is full."""
        tier = self._tier(tiles[0])
        sources = {id(tile): load for tile in tiles if (load := self._host.resident(tile)) is not None}
        missing = tuple(tile for tile in tiles if id(tile) not in sources)
        if missing:
            load = self._host.fetch(missing)
            self._full = load is None
            if load is None:
                return False
            sources |= dict.fromkeys(map(id, missing), load)
            self.statistics.bytes_read += sum(extent.nbytes for tile in missing for extent in tile.extents)
            self.statistics.resident_bytes = self._host.resident_bytes
            if self._recorder.active:
                self._report(missing)
        if self._device is None and tier is Tier.HOST:
            return True  # it is where it stays
        shipment = Shipment(tiles, sweep, tier, sources)
        self._in_flight.append(shipment)
        if self._uploads is not None:
            self._uploads.add(shipment)
        if tier is Tier.DEVICE:
            self._settling.update(map(id, tiles))
        return True

    def _give_back(self, load: Load) -> None:
        """Its room in the host's ring."""
        self._host.release(load)
        self._full = False

    def _report(self, tiles: tuple[Tile, ...]) -> None:
        for tile in tiles:
            begins = tile.role == "gate_up" and tile.start == 0  # an expert's first tile counts it
            self._recorder.submitted(self.modules[tile.module].layer, tile.expert if begins else -1, tile.nbytes)

    def close(self) -> None:
        """Wait for reads and copies in flight and give the memory back; the rings are their owner's."""
        self._drop_in_flight()
        self._host.close()
        if self._device is not None:
            self._device.close()
