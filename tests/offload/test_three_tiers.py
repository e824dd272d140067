"""Weights on their way from disk over host memory to a device, on the simulated one: who is read and copied how often,
the smallest rings, narrowing, faults in the middle. (test_cuda_stream.py takes each wait out in turn.)"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from streams import FakeMatrix, HeldReader, layer_modules

from batchgen_lite.errors import StorageError
from batchgen_lite.offload.device_tier import DeviceTier, device_footprint
from batchgen_lite.offload.devices.protocol import Lane
from batchgen_lite.offload.devices.sim import OrderError, SimDevice, SimEvent
from batchgen_lite.offload.residents import tile_footprint
from batchgen_lite.offload.ring import Ring
from batchgen_lite.offload.stream import StreamAborted, WeightStream
from batchgen_lite.offload.tiles import Module, Tile

EXPERTS = 6
ALL = [9] * EXPERTS


def tiles_of(modules: Sequence[Module]) -> list[Tile]:
    return [tile for module in modules for tile in module.tiles]


class Setup:
    """A stream over a simulated device; ``walk`` goes through one sweep as compute would."""

    def __init__(
        self,
        modules: Sequence[Module],
        *,
        host_ring: int,
        device_ring: int | None,
        on_host: Sequence[Tile] = (),
        on_device: Sequence[Tile] = (),
    ) -> None:
        self.device = SimDevice(1 << 24)
        self.reader = HeldReader()
        self.modules = modules
        self._ring = None if device_ring is None else self.device.allocate(device_ring)
        tier = DeviceTier(self.device, None if self._ring is None else Ring(self._ring, 256), on_device)
        host = Ring(self.device.host_memory(host_ring), self.reader.alignment)
        self.stream = WeightStream(modules, self.reader, host, on_host, device=tier)

    def walk(self, counts: Sequence[int] = ALL) -> list[int]:
        """One sweep: the numbers of the tiles."""
        self.stream.begin_sweep(sum(counts))
        return list(self.go(counts))

    def go(self, counts: Sequence[int]) -> Generator[int, None, None]:
        """The numbers of a sweep's tiles, after holding each against the device's arena and its own bytes."""
        for module in self.modules:
            for tile, parts in self.stream.tiles(module, torch.tensor(counts) if module.routed else None):
                number = tile.matrix.number  # type: ignore[attr-defined]
                for part in parts:
                    self.device.computes(f"tile {number}", part)
                    assert bool((part == number % 251).all()), number
                yield number

    def reads(self) -> Counter[int]:
        return Counter(self.reader.reads)

    def close(self) -> None:
        self.device.close()
        self.stream.close()
        if self._ring is not None:
            self._ring.close()
        self.reader.close()
        assert self.device.memory().used == 0


@contextmanager
def setup(modules: Sequence[Module], **sizes: object) -> Iterator[Setup]:
    made = Setup(modules, **sizes)  # type: ignore[arg-type]
    yield made
    made.close()


def expected(modules: Sequence[Module], counts: Sequence[int] = ALL) -> list[int]:
    return [
        tile.matrix.number  # type: ignore[attr-defined]
        for tile in tiles_of(modules)
        if tile.expert < 0 or counts[tile.expert]
    ]


def numbers(tiles: Sequence[Tile]) -> set[int]:
    return {tile.matrix.number for tile in tiles}  # type: ignore[attr-defined]


SIZES = {"host_ring": 1 << 18, "device_ring": 1 << 17}


def test_each_tier_is_read_and_copied_as_often_as_it_has_to() -> None:
    modules = layer_modules(layers=3, experts=EXPERTS)
    tiles = tiles_of(modules)
    on_device, on_host = tiles[::3], tiles[1::3]
    with setup(modules, on_device=on_device, on_host=on_host, **SIZES) as made:
        for _ in range(4):
            assert made.walk() == expected(modules)
        reads = made.reads()
        copied = made.stream.statistics.copied_bytes
    assert {reads[number] for number in numbers(on_device)} == {1}
    assert {reads[number] for number in numbers(on_host)} == {1}
    streamed = numbers(tiles[2::3])
    assert {reads[number] for number in streamed} <= {4, 5}  # of the fifth sweep some is on its way
    size = {tile.matrix.number: tile.nbytes for tile in tiles}  # type: ignore[attr-defined]
    every_sweep = sum(size[number] for number in streamed | numbers(on_host))
    assert copied >= 4 * every_sweep + sum(size[number] for number in numbers(on_device)) - 2 * max(size.values())
    assert copied <= 5 * every_sweep + sum(size[number] for number in numbers(on_device))


@pytest.mark.parametrize("kept", [0, 2, 3, 5])
@pytest.mark.parametrize("slow", [False, True])
def test_rings_that_hold_one_tile_each_are_enough(kept: int, slow: bool) -> None:
    modules = layer_modules(layers=3, experts=EXPERTS)
    tiles = tiles_of(modules)
    one_read = max(tile_footprint(tile, 4096) for tile in tiles)
    one_copy = max(device_footprint(tile) for tile in tiles)
    on_device = tiles[::kept] if kept else []
    on_host = tiles[1::kept] if kept else []
    with setup(modules, host_ring=one_read, device_ring=one_copy, on_device=on_device, on_host=on_host) as made:
        made.reader.slow = slow
        for counts in (ALL, [1, 0, 0, 0, 0, 0], ALL, [0, 0, 0, 0, 0, 3], ALL):
            assert made.walk(counts) == expected(modules, counts)


def test_a_model_that_fits_the_device_needs_no_ring_there() -> None:
    modules = layer_modules(layers=2, experts=EXPERTS)
    with setup(modules, host_ring=1 << 16, device_ring=None, on_device=tiles_of(modules)) as made:
        for _ in range(3):
            assert made.walk() == expected(modules)
        assert set(made.reads().values()) == {1}


def test_a_device_resident_that_only_a_later_sweep_needs_is_read_then() -> None:
    modules = layer_modules(layers=1, experts=EXPERTS)
    with setup(modules, host_ring=1 << 16, device_ring=None, on_device=tiles_of(modules)) as made:
        made.walk([5, 0, 0, 0, 0, 0])
        made.walk([5, 0, 7, 0, 0, 0])
        experts = {tile.matrix.number: tile.expert for tile in modules[1].tiles}  # type: ignore[attr-defined]
        assert Counter(experts[n] for n in made.reads() if n in experts) == {0: 2, 2: 2}


def test_what_the_router_did_not_choose_is_not_copied() -> None:
    modules = layer_modules(layers=2, experts=EXPERTS)
    experts = [tile for module in modules if module.routed for tile in module.tiles]
    rings = {"host_ring": 1 << 18, "device_ring": max(device_footprint(tile) for tile in tiles_of(modules))}
    with setup(modules, on_host=experts, **rings) as made:
        made.walk()
        before = made.stream.statistics.copied_bytes
        assert made.walk([54, 0, 0, 0, 0, 0]) == expected(modules, [54, 0, 0, 0, 0, 0])
        copied = made.stream.statistics.copied_bytes - before
    everything = sum(tile.nbytes for tile in tiles_of(modules))
    assert copied < everything / 2
    assert numbers(experts) <= made.reads().keys()


def test_batches_hold_what_lies_together() -> None:
    modules = layer_modules(layers=1, experts=EXPERTS)
    routed = modules[1]
    with setup(modules, host_ring=1 << 18, device_ring=1 << 17) as made:
        made.walk()
        made.stream.begin_sweep(54)
        list(made.stream.tiles(modules[0]))
        seen = []
        for batch in made.stream.batches(routed, torch.tensor(ALL)):
            for tile, parts in batch.tiles:
                assert all(made.device.holds(part) for part in parts)
                start = batch.memory.data_ptr()
                assert all(start <= part.data_ptr() < start + batch.memory.numel() for part in parts)
                seen.append(tile)
        assert seen == list(routed.tiles)


PLACES = st.sampled_from(["device", "host", "disk"])
SWEEP = st.tuples(st.lists(st.sampled_from([0, 1, 9, 40]), min_size=4, max_size=4).filter(any), st.integers(0, 40))


@given(
    places=st.lists(PLACES, min_size=20, max_size=20),
    host_loads=st.floats(1.0, 6.0),
    device_loads=st.floats(1.0, 6.0),
    sweeps=st.lists(SWEEP, min_size=1, max_size=5),
    polls=st.sampled_from([0, 1, 5, 1000]),
    slow=st.booleans(),
)
@settings(max_examples=60)
def test_any_division_any_rings_any_routing_any_end(
    places: list[str],
    host_loads: float,
    device_loads: float,
    sweeps: list[tuple[list[int], int]],
    polls: int,
    slow: bool,
) -> None:
    """Whatever lies where, every sweep gets its own bytes in order, and nothing blocks for ever. ``polls``: how often a
    copy is looked at before it is done; each sweep is its routing and the tile before which it is given up, if any."""
    modules = layer_modules(layers=2, experts=4)
    tiles = tiles_of(modules)
    assert len(tiles) == len(places)
    on = {where: [t for t, place in zip(tiles, places, strict=True) if place == where] for where in ("device", "host")}
    one_read = max(tile_footprint(tile, 4096) for tile in tiles)
    one_copy = max(device_footprint(tile) for tile in tiles)
    rings = {"host_ring": int(host_loads * one_read), "device_ring": int(device_loads * one_copy)}
    with (
        setup(modules, on_device=on["device"], on_host=on["host"], **rings) as made,
        pytest.MonkeyPatch.context() as patch,
    ):
        made.reader.slow = slow
        original = SimEvent.done
        patch.setattr(SimEvent, "done", lambda event: _looked_at(event) > polls and original(event))
        for counts, given_up in sweeps:
            if given_up < len(tiles):
                made.stream.begin_sweep(sum(counts))
                walked = made.go(counts)
                for _ in zip(range(given_up), walked, strict=False):
                    pass
                walked.close()
                made.stream.reset()
            else:
                assert made.walk(counts) == expected(modules, counts)
        assert made.walk(counts) == expected(modules, counts)


def _looked_at(event: SimEvent) -> int:
    event.polls += 1
    return event.polls


# -- what goes wrong --------------------------------------------------------------------------------------------------


def test_a_sweep_may_end_anywhere_and_the_next_one_is_right() -> None:
    modules = layer_modules(layers=2, experts=EXPERTS)
    tiles = tiles_of(modules)
    with setup(modules, on_device=tiles[::4], on_host=tiles[1::4], **SIZES) as made:
        for ends_at in range(len(tiles)):
            made.stream.begin_sweep(54)
            walked = made.go(ALL)
            for _ in zip(range(ends_at), walked, strict=False):
                pass
            walked.close()
            made.stream.reset()
            if ends_at % 4 == 0:
                assert made.walk() == expected(modules)


def test_an_abort_ends_a_sweep_that_waits_for_the_disk() -> None:
    modules = layer_modules(layers=1, experts=2)
    with setup(modules, **SIZES) as made:
        made.reader.hold = True
        made.stream.abort()
        with pytest.raises(StreamAborted):
            made.walk([5, 5])
        made.reader.release_all()
        made.stream.reset()
        made.stream.rearm()
        assert made.walk([5, 5]) == expected(modules, [5, 5])


@pytest.mark.parametrize("keep", ["device", "host", "none"])
def test_a_failed_read_reaches_the_sweep_and_is_tried_again(keep: str) -> None:
    modules = layer_modules(layers=2, experts=EXPERTS)
    tiles = tiles_of(modules)
    kept = {"device": {"on_device": tiles}, "host": {"on_host": tiles}, "none": {}}[keep]
    with setup(modules, **SIZES, **kept) as made:
        made.reader.fail = StorageError("input/output error in model.safetensors at offset 4096")
        with pytest.raises(StorageError, match="offset 4096"):
            made.walk()
        made.reader.fail = None
        made.stream.reset()
        for _ in range(2):
            assert made.walk() == expected(modules)


@pytest.mark.parametrize("keep", ["device", "host", "none"])
@pytest.mark.parametrize("copies", [0, 1, 5, 9])
def test_a_failed_copy_reaches_the_sweep_and_is_tried_again(
    keep: str, copies: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    modules = layer_modules(layers=2, experts=EXPERTS)
    tiles = tiles_of(modules)
    kept = {"device": {"on_device": tiles}, "host": {"on_host": tiles}, "none": {}}[keep]
    with setup(modules, host_ring=1 << 15, device_ring=1 << 14, **kept) as made:
        original, left = made.device.copy, copies

        def copy(lane: Lane, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> object:
            nonlocal left
            if left == 0:
                raise MemoryError("the device is out of memory")
            left -= 1
            return original(lane, pairs)

        monkeypatch.setattr(made.device, "copy", copy)
        with pytest.raises(MemoryError, match="out of memory"):
            made.walk()
        left = 1000
        made.stream.reset()
        for _ in range(2):
            assert made.walk() == expected(modules)


@pytest.mark.parametrize("lane", [Lane.COMPUTE, Lane.COPY_IN])
def test_the_simulated_device_notices_a_lane_that_does_not_wait(lane: Lane, monkeypatch: pytest.MonkeyPatch) -> None:
    modules = layer_modules(layers=2, experts=EXPERTS)
    one_copy = max(device_footprint(tile) for tile in tiles_of(modules))
    with setup(modules, host_ring=1 << 16, device_ring=one_copy) as made:
        original = made.device.wait
        monkeypatch.setattr(SimEvent, "done", lambda event: False)  # or the host's own look would order the two
        monkeypatch.setattr(made.device, "wait", lambda which, event: None if which is lane else original(which, event))
        with pytest.raises(OrderError):
            made.walk()
        monkeypatch.undo()
        made.stream.reset()
        made.device.record(Lane.COPY_IN).synchronize()
        assert made.walk() == expected(modules)


def test_fake_matrices_differ() -> None:
    """The checks above would see a tile in another's place."""
    found = [tile.matrix for tile in tiles_of(layer_modules(layers=3, experts=EXPERTS))]
    assert all(isinstance(matrix, FakeMatrix) for matrix in found)
    assert len({matrix.number % 251 for matrix in found}) == len(found)  # type: ignore[attr-defined]
