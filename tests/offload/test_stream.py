"""The weight stream, with a reader that completes when the test says so: order, exactness of reads, faults."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest
import torch
from streams import FakeMatrix, layer_modules, make_stream

from batchgen_lite.errors import StorageError
from batchgen_lite.offload.stream import StreamAborted, WeightStream


def walk(stream: WeightStream, counts: Sequence[int] | None = None) -> list[int]:
    """One sweep; returns the numbers of the tiles in the order in which they came, after checking their bytes."""
    seen = []
    stream.begin_sweep(sum(counts) if counts else 100)
    for module in stream.modules:
        routed = torch.tensor(counts) if module.routed else None
        for tile, parts in stream.tiles(module, routed):
            matrix = tile.matrix
            assert isinstance(matrix, FakeMatrix)
            for part in parts:
                assert bool((part == matrix.number % 251).all())
            seen.append(matrix.number)
    return seen


def test_tiles_come_in_order_with_their_own_bytes() -> None:
    modules = layer_modules(layers=3, experts=4)
    stream, reader = make_stream(modules, ring_bytes=1 << 20)
    expected = [tile.matrix.number for module in modules for tile in module.tiles]  # type: ignore[attr-defined]
    for _ in range(3):
        assert walk(stream, [5, 5, 5, 5]) == expected
    assert reader.pieces_read >= 3 * len(expected) - len(expected)


def test_routed_experts_are_read_exactly_once_a_sweep_and_no_others_when_few_are_chosen() -> None:
    modules = layer_modules(layers=4, experts=16)
    stream, reader = make_stream(modules, ring_bytes=1 << 20)
    counts = [0] * 16
    counts[3] = counts[11] = 2
    for sweep in range(5):
        walk(stream, counts)
        assert stream.statistics.expert_reads == (sweep + 1) * 4 * 2
    assert stream.statistics.unrouted_expert_reads == 0
    assert stream.statistics.read_ahead_modules == 0
    for tile in (tile for module in modules if module.routed for tile in module.tiles):
        times = reader.reads.count(tile.matrix.number)  # type: ignore[attr-defined]
        assert times == (5 if tile.expert in (3, 11) else 0), tile.expert


def test_a_batch_that_touches_nearly_all_experts_is_read_ahead_of_the_router() -> None:
    modules = layer_modules(layers=2, experts=8)
    stream, _ = make_stream(modules, ring_bytes=1 << 22)
    walk(stream, [40] * 8)
    assert stream.statistics.router_wait_modules == 2  # nothing was known yet
    assert stream.statistics.read_ahead_modules == 2  # and now both layers of the next sweep are on their way


def test_read_ahead_is_narrowed_as_soon_as_the_router_has_spoken() -> None:
    modules = layer_modules(layers=1, experts=32, expert_rows=1024)
    stream, reader = make_stream(modules, ring_bytes=1 << 16)  # room for a few experts only
    walk(stream, [40] * 32)
    before = len(reader.reads)
    counts = [0] * 32
    counts[30] = counts[31] = 640
    walk(stream, counts)
    unrouted = stream.statistics.unrouted_expert_reads
    assert 0 < unrouted < 10  # what was in flight already; not the 30 that nobody chose
    assert len(reader.reads) > before


def test_residents_are_read_once_and_take_no_ring() -> None:
    modules = layer_modules(layers=2, experts=4)
    stream, reader = make_stream(modules, ring_bytes=None, resident=[tile for m in modules for tile in m.tiles])
    expected = [tile.matrix.number for module in modules for tile in module.tiles]  # type: ignore[attr-defined]
    for _ in range(4):
        assert walk(stream, [5] * 4) == expected
    assert sorted(reader.reads) == sorted(expected)
    assert stream.statistics.resident_bytes == sum(module.nbytes for module in modules)


def test_a_resident_expert_nobody_chose_is_not_read() -> None:
    modules = layer_modules(layers=1, experts=4)
    stream, reader = make_stream(modules, ring_bytes=1 << 20, resident=list(modules[1].tiles))
    walk(stream, [5, 0, 0, 0])
    walk(stream, [5, 0, 7, 0])
    numbers = {tile.matrix.number: tile.expert for tile in modules[1].tiles}  # type: ignore[attr-defined]
    read = [numbers[number] for number in reader.reads if number in numbers]
    assert sorted(read) == [0, 0, 2, 2]  # gate_up and down of each


@pytest.mark.parametrize("resident_every", [0, 2, 3])
def test_a_ring_of_two_loads_is_enough(resident_every: int) -> None:
    modules = layer_modules(layers=3, experts=6)
    tiles = [tile for module in modules for tile in module.tiles]
    resident = tiles[::resident_every] if resident_every else []
    stream, _ = make_stream(modules, ring_bytes=2 * 3 * 4096, resident=resident)
    for counts in ([9] * 6, [1, 0, 0, 0, 0, 0], [9] * 6, [0, 0, 0, 0, 0, 3], [9] * 6):
        expected = [
            tile.matrix.number  # type: ignore[attr-defined]
            for module in modules
            for tile in module.tiles
            if tile.expert < 0 or counts[tile.expert]
        ]
        assert walk(stream, counts) == expected


def test_a_failed_read_reaches_the_sweep_and_the_next_sweep_works() -> None:
    modules = layer_modules(layers=2, experts=4)
    stream, reader = make_stream(modules, ring_bytes=1 << 20)
    reader.fail = StorageError("input/output error in model.safetensors at offset 4096")
    with pytest.raises(StorageError, match="offset 4096"):
        walk(stream, [5] * 4)
    reader.fail = None
    stream.reset()
    assert len(walk(stream, [5] * 4)) == sum(len(module.tiles) for module in modules)


def test_a_failed_read_of_a_resident_is_tried_again() -> None:
    modules = layer_modules(layers=1, experts=2)
    stream, reader = make_stream(modules, ring_bytes=None, resident=[tile for m in modules for tile in m.tiles])
    reader.fail = StorageError("no")
    with pytest.raises(StorageError):
        walk(stream, [5, 5])
    reader.fail = None
    stream.reset()
    assert len(walk(stream, [5, 5])) == sum(len(module.tiles) for module in modules)


def test_an_abort_ends_a_sweep_that_waits_for_the_disk() -> None:
    modules = layer_modules(layers=1, experts=2)
    stream, reader = make_stream(modules, ring_bytes=1 << 20)
    reader.hold = True
    threading.Timer(0.02, stream.abort).start()
    with pytest.raises(StreamAborted):
        walk(stream, [5, 5])
    reader.release_all()
    stream.reset()
    with pytest.raises(StreamAborted):  # until it is armed again
        walk(stream, [5, 5])
    stream.reset()
    stream.rearm()
    assert walk(stream, [5, 5])


def test_memory_is_not_granted_again_while_a_read_still_writes_to_it() -> None:
    modules = layer_modules(layers=6, experts=8)
    stream, reader = make_stream(modules, ring_bytes=3 * 3 * 4096)
    reader.slow = True  # completes later, on another thread; walk checks every byte of every tile
    expected = sum(len(module.tiles) for module in modules)
    assert [len(walk(stream, [5] * 8)) for _ in range(3)] == [expected] * 3
    reader.close()


def test_the_producer_stays_within_the_next_sweep() -> None:
    modules = layer_modules(layers=2, experts=4)
    stream, reader = make_stream(modules, ring_bytes=1 << 22)  # room for many sweeps
    walk(stream, [25] * 4)
    walk(stream, [25] * 4)
    tiles = sum(len(module.tiles) for module in modules)
    assert len(reader.reads) <= 3 * tiles


@pytest.mark.parametrize("ring_bytes", [3 * 4096 * 2, 1 << 20])
def test_tiles_that_are_kept_later_are_read_once_more_as_they_come_by_and_never_again(ring_bytes: int) -> None:
    modules = layer_modules(layers=3, experts=6)
    tiles = [tile for module in modules for tile in module.tiles]
    numbers = [tile.matrix.number for tile in tiles]  # type: ignore[attr-defined]
    first, second = tiles[::5], tiles[1::3]
    stream, reader = make_stream(modules, ring_bytes=ring_bytes, resident=first)
    for _ in range(2):
        assert walk(stream, [5] * 6) == numbers
    fresh = [tile for tile in second if tile not in first]
    stream.keep(fresh)
    assert walk(stream, [5] * 6) == numbers
    assert walk(stream, [5] * 6) == numbers
    kept = {*first, *fresh}
    assert stream.statistics.resident_bytes == sum(tile.nbytes for tile in kept)
    before = len(reader.reads)
    for _ in range(3):
        assert walk(stream, [5] * 6) == numbers
    read = set(reader.reads[before:])
    assert sorted(read) == sorted(tile.matrix.number for tile in tiles if tile not in kept)  # type: ignore[attr-defined]
    # All in all each was read once a sweep while it streamed, and once into its place. What was on its way through a
    # large ring at the moment of the change still came by that way.
    for tile in fresh:
        assert reader.reads.count(tile.matrix.number) <= 4, tile.matrix.number  # type: ignore[attr-defined]


def test_all_can_be_kept_in_steps_and_forgotten_again() -> None:
    modules = layer_modules(layers=2, experts=4)
    tiles = [tile for module in modules for tile in module.tiles]
    numbers = [tile.matrix.number for tile in tiles]  # type: ignore[attr-defined]
    stream, reader = make_stream(modules, ring_bytes=1 << 20, resident=tiles[:3])
    walk(stream, [5, 0, 0, 0])
    for step in (tiles[3:9], tiles[9:]):
        stream.keep(step)
        walk(stream, [5, 5, 0, 0])
    for _ in range(2):
        assert walk(stream, [5] * 4) == numbers
    before = len(reader.reads)
    assert walk(stream, [5] * 4) == numbers
    assert len(reader.reads) == before
    stream.keep_no_more()
    assert stream.statistics.resident_bytes <= sum(tile.nbytes for tile in tiles[:3])
    for _ in range(2):
        assert walk(stream, [5] * 4) == numbers
    assert stream.statistics.resident_bytes == sum(tile.nbytes for tile in tiles[:3])
    assert all(reader.reads[before:].count(number) >= 2 for number in numbers[3:])


def test_a_failed_read_of_a_tile_kept_later_is_tried_again_and_memory_still_goes_back() -> None:
    modules = layer_modules(layers=1, experts=2)
    tiles = [tile for module in modules for tile in module.tiles]
    stream, reader = make_stream(modules, ring_bytes=1 << 20)
    walk(stream, [5, 5])
    stream.keep(tiles)
    reader.fail = StorageError("no")
    stream.reset()  # what was on its way already
    with pytest.raises(StorageError):
        walk(stream, [5, 5])
    reader.fail = None
    stream.reset()
    assert len(walk(stream, [5, 5])) == len(tiles)
    stream.keep_no_more()
    assert len(walk(stream, [5, 5])) == len(tiles)
