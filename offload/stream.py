"""Weights on their way: a stream of tiles in sweep order, read ahead across modules, layers and sweeps.

The consumer (the engine thread) walks through a sweep's modules and asks for each one's tiles. The producer runs ahead
of it: whenever room in the ring becomes free it submits the next read, so the link stays busy while the consumer
computes. There is no producer thread. ``pump`` submits whatever fits, and is called wherever room or knowledge
appears: when a load has been consumed, when a router has spoken, when a sweep begins. Reads complete on the reader's
threads, which do nothing but set the load's event.

Which experts to read. Ahead of the router nobody knows which experts a layer will need. With large batches that does
not matter: nearly all are touched, and reading all of them keeps the link busy. With small ones it is waste. So for
each layer the stream predicts the share of experts that the coming tokens will touch, from how often each expert was
chosen so far; at SPECULATE_FROM and above it reads ahead, below it waits for the router and reads only what was chosen.
A read-ahead that the router overtakes is narrowed to the chosen experts at once. Unneeded reads are counted apart.

Resident tiles are read once, on first use, into memory of their own, and never again.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from batchgen_lite.errors import StorageError
from batchgen_lite.offload.arena import Arena
from batchgen_lite.offload.load import Load
from batchgen_lite.offload.readers.placement import place
from batchgen_lite.offload.readers.protocol import Reader
from batchgen_lite.offload.residents import tile_footprint
from batchgen_lite.offload.ring import Grant, Ring
from batchgen_lite.offload.tiles import SHARED_EXPERT, Module, Tile
from batchgen_lite.trace.recorder import SILENT, Recorder

LOAD_BYTES = 8 << 20  # tiles travel together up to about this size: fewer, larger reads
SWEEPS_AHEAD = 1  # how far the producer may be ahead of the consumer
LOADS_IN_RING = 4  # at least so many loads fit the ring at once, unless single tiles are larger
SPECULATE_FROM = 0.9  # predicted share of touched experts from which reading all of them ahead pays
FORGET = 0.5  # weight of the newest sweep in the running average of routing frequencies


class StreamAborted(Exception):
    """The consumer was told to stop."""


@dataclass(slots=True)
class StreamStatistics:
    """Totals since the stream was made. Expert reads count (layer, expert) pairs brought from the disk."""

    bytes_read: int = 0
    expert_reads: int = 0
    unrouted_expert_reads: int = 0
    resident_bytes: int = 0
    wait_seconds: float = 0.0  # the consumer waited for a read: the link was the bottleneck
    router_wait_modules: int = 0  # expert modules that were read only after their router had spoken
    read_ahead_modules: int = 0


class WeightStream:
    """Tiles of ``modules`` in order, sweep after sweep. One consumer thread calls everything but ``abort``."""

    def __init__(
        self,
        modules: Sequence[Module],
        reader: Reader,
        ring: Ring | None,
        resident: Iterable[Tile] = (),
        recorder: Recorder = SILENT,
    ) -> None:
        """``resident`` tiles stay in memory; all others pass through ``ring`` (None if there are no others)."""
        self.modules = tuple(modules)
        self.statistics = StreamStatistics()
        self._reader = reader
        self._ring = ring
        self._recorder = recorder
        self._load_bytes = LOAD_BYTES if ring is None else min(LOAD_BYTES, ring.capacity // LOADS_IN_RING)
        self._footprint = {
            id(tile): tile_footprint(tile, reader.alignment) for module in self.modules for tile in module.tiles
        }
        self._resident = {id(tile): None for tile in resident}
        self._resident_loads: dict[int, Load] = {}  # id(tile) -> where it lies, once submitted
        self._resident_arena, self._resident_free = self._reserve_residents(), 0
        self._in_flight: deque[Load] = deque()  # submitted to the ring, in order
        self._frequency: dict[int, torch.Tensor] = {}  # module -> running share of tokens that chose each expert
        self._abort = threading.Event()
        self._tokens = 0
        self._chosen: dict[tuple[int, int], frozenset[int]] = {}  # (sweep, module) -> experts that were chosen
        self._restart(0)

    # -- sweeps ---------------------------------------------------------------------------------------------------

    def begin_sweep(self, tokens: int) -> None:
        """A sweep over ``tokens`` tokens begins; its modules will be asked for in order."""
        self._tokens = tokens
        self._sweep += 1
        # The producer may still have to step over unneeded tiles of the sweep before this one.
        self._chosen = {key: chosen for key, chosen in self._chosen.items() if key[0] >= self._sweep - 1}
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
        for load in set(self._resident_loads.values()):
            load.ready.wait()
            if load.error is not None:
                load.ready.clear()
                self._reader.submit(load.pieces(), load.done)
        for load in self._in_flight:
            load.ready.wait()
            if load.grant is not None and self._ring is not None:
                self._ring.release(load.grant)
        self._in_flight.clear()
        self._restart(self._sweep)

    def _restart(self, sweep: int) -> None:
        self._sweep = sweep
        self._chosen.clear()
        self._producer = self._produce(sweep + 1)
        self._next: tuple[int, tuple[Tile, ...]] | None = None

    # -- the consumer's side --------------------------------------------------------------------------------------

    def tiles(self, module: Module, counts: torch.Tensor | None = None) -> Iterator[tuple[Tile, list[torch.Tensor]]]:
        """The tiles of ``module`` in order, each with one uint8 tensor per extent, valid until the next is asked for.

        ``counts``: for a routed module, tokens per expert [E]; tiles of experts without tokens are left out.
        Raises StreamAborted after ``abort`` and StorageError when a read failed.
        """
        wanted = module.tiles
        if module.routed:
            assert counts is not None, "a routed module needs the router's counts"
            chosen = self._route(module, counts)
            wanted = tuple(tile for tile in module.tiles if tile.expert == SHARED_EXPERT or tile.expert in chosen)
        for tile in wanted:
            load = self._load_of(tile)
            self._wait(load)
            since = self._recorder.now()
            yield tile, load.parts(tile)
            resident = load.grant is None
            self._recorder.tile(module.kind, module.layer, tile.expert, tile.nbytes, since, resident=resident)
        self._retire(module)

    def _route(self, module: Module, counts: torch.Tensor) -> frozenset[int]:
        chosen = frozenset(counts.nonzero().flatten().tolist())
        self._chosen[self._sweep, module.index] = chosen
        if self._recorder.active:
            self._recorder.routed(module.layer, counts.tolist())
        share = counts.double() / max(1, self._tokens)
        before = self._frequency.get(module.index)
        self._frequency[module.index] = share if before is None else before.lerp(share, FORGET)
        self.pump()
        return chosen

    def _load_of(self, tile: Tile) -> Load:
        """The load that carries ``tile``, after giving back the room of everything before it."""
        while True:
            load = self._resident_loads.get(id(tile))
            if load is not None:
                return load
            if not self._in_flight:
                self.pump()
                if not self._in_flight and id(tile) not in self._resident_loads:
                    raise RuntimeError(f"tile {tile.start}:{tile.stop} of module {tile.module} was never asked for")
                continue
            if id(tile) in self._in_flight[0].positions:
                return self._in_flight[0]
            self._release(self._in_flight.popleft())

    def _wait(self, load: Load) -> None:
        if not load.ready.is_set():
            started, since = time.perf_counter(), self._recorder.now()
            while not load.ready.wait(0.05):
                if self._abort.is_set():
                    break
            self.statistics.wait_seconds += time.perf_counter() - started
            self._recorder.waited(since)
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

    def _release(self, load: Load) -> None:
        load.ready.wait()  # never hand out memory that a read still writes to
        module = self.modules[load.tiles[0].module]
        if module.routed:
            chosen = self._chosen.get((self._sweep, module.index), frozenset())
            begun = {tile.expert for tile in load.tiles if tile.role == "gate_up" and tile.start == 0}
            begun.discard(SHARED_EXPERT)
            self.statistics.expert_reads += len(begun & chosen)
            self.statistics.unrouted_expert_reads += len(begun - chosen)
        if load.grant is not None:
            assert self._ring is not None
            self._ring.release(load.grant)
        self.pump()

    # -- the producer's side --------------------------------------------------------------------------------------

    def pump(self) -> None:
        """Submit the next loads, in order, for as long as the ring has room and it is known what to read."""
        while True:
            if self._next is None:
                self._next = next(self._producer)
                if self._next is None:
                    return
            sweep, tiles = self._next
            # The router may have spoken since the group was put together.
            needed = tuple(tile for tile in tiles if self._needed(tile, sweep))
            if needed and not self._submit(needed):
                return
            self._next = None

    def _produce(self, sweep: int) -> Iterator[tuple[int, tuple[Tile, ...]] | None]:
        """Endless: (sweep, tiles to load together next), or None while it must wait, for a router or a sweep."""
        while True:
            while sweep > self._sweep + SWEEPS_AHEAD:
                yield None  # the ring would hold the same weights twice
            for module in self.modules:
                missing = [tile for tile in module.tiles if id(tile) not in self._resident_loads]
                if not missing:
                    continue
                ahead = not module.routed or self._expects_all(module)
                while not ahead and (sweep, module.index) not in self._chosen:
                    yield None
                if module.routed:
                    if ahead:
                        self.statistics.read_ahead_modules += 1
                    else:
                        self.statistics.router_wait_modules += 1
                yield from self._groups(missing, sweep)
            if all(id(tile) in self._resident_loads for module in self.modules for tile in module.tiles):
                while True:
                    yield None
            sweep += 1

    def _groups(self, tiles: list[Tile], sweep: int) -> Iterator[tuple[int, tuple[Tile, ...]]]:
        """Consecutive needed tiles that travel together, residents and streamed ones apart."""
        group: list[Tile] = []
        size, residents = 0, False
        for tile in tiles:
            if not self._needed(tile, sweep):
                continue
            resident = id(tile) in self._resident
            footprint = self._footprint[id(tile)]
            if group and (size + footprint > self._load_bytes or resident != residents):
                yield sweep, tuple(group)
                group, size = [], 0
            group.append(tile)
            size += footprint
            residents = resident
        if group:
            yield sweep, tuple(group)

    def _needed(self, tile: Tile, sweep: int) -> bool:
        if tile.expert == SHARED_EXPERT:
            return True
        chosen = self._chosen.get((sweep, tile.module))
        return chosen is None or tile.expert in chosen

    def _expects_all(self, module: Module) -> bool:
        """Whether the coming tokens are expected to touch nearly every expert: mean of 1 - (1 - f)^tokens."""
        frequency = self._frequency.get(module.index)
        if frequency is None or self._tokens == 0:
            return False
        touched = 1.0 - (1.0 - frequency.clamp(max=1.0)) ** self._tokens
        return float(touched.mean()) >= SPECULATE_FROM

    def _submit(self, tiles: tuple[Tile, ...]) -> bool:
        """Read ``tiles`` into residents' memory or into the ring; False while the ring is full."""
        order = sorted(
            ((extent, tile, i) for tile in tiles for i, extent in enumerate(tile.extents)),
            key=lambda entry: (entry[0].file, entry[0].offset),
        )
        extents = [extent for extent, _, _ in order]
        alignment = self._reader.alignment
        grant: Grant | None = None
        if id(tiles[0]) in self._resident:
            assert self._resident_arena is not None
            arena, start = self._resident_arena, self._resident_free
        else:
            assert self._ring is not None, "a streamed tile without a ring"
            grant = self._ring.grant(place(extents, 0, alignment).end)
            if grant is None:
                return False
            arena, start = self._ring.arena, grant.start
        placement = place(extents, start, alignment)
        positions: dict[int, list[int]] = {id(tile): [0] * len(tile.extents) for tile in tiles}
        for (_, tile, i), position in zip(order, placement.positions, strict=True):
            positions[id(tile)][i] = position
        load = Load(tiles, arena, positions, grant)
        if grant is None:
            self._resident_free = placement.end
            self.statistics.resident_bytes += sum(tile.nbytes for tile in tiles)
            for tile in tiles:
                self._resident_loads[id(tile)] = load
        else:
            self._in_flight.append(load)
        self.statistics.bytes_read += sum(extent.nbytes for extent in extents)
        if self._recorder.active:
            self._report(tiles)
        self._reader.submit(load.pieces(), load.done)
        return True

    def _report(self, tiles: tuple[Tile, ...]) -> None:
        for tile in tiles:
            begins = tile.role == "gate_up" and tile.start == 0  # an expert's first tile counts it
            self._recorder.submitted(self.modules[tile.module].layer, tile.expert if begins else -1, tile.nbytes)

    def _reserve_residents(self) -> Arena | None:
        """Address space for all residents; pages are touched when they are read."""
        footprint = sum(
            self._footprint[id(tile)] for module in self.modules for tile in module.tiles if id(tile) in self._resident
        )
        return Arena(footprint) if footprint else None

    def close(self) -> None:
        """Wait for reads in flight and give the memory back."""
        for load in [*self._in_flight, *self._resident_loads.values()]:
            load.ready.wait()
        self._in_flight.clear()
        self._resident_loads.clear()
        if self._resident_arena is not None:
            self._resident_arena.close()
            self._resident_arena = None
