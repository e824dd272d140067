"""Tiles that several threads compute with at a time: what they hold is not given away, and waiting is counted right."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

import pytest
import torch
from streams import FakeMatrix, layer_modules, make_stream

from batchgen_lite.errors import StorageError
from batchgen_lite.offload.held_tiles import HeldTile, Holds
from batchgen_lite.offload.host_tier import HostTier
from batchgen_lite.offload.load import Shipment
from batchgen_lite.offload.read_ahead import Tier
from batchgen_lite.offload.stream import StreamAborted, WeightStream
from batchgen_lite.offload.tiles import Module

PAGE = 4096
EXPERTS = 12


def idle() -> float:
    return 0.0


def number_of(held: HeldTile) -> int:
    assert isinstance(held.tile.matrix, FakeMatrix)
    return held.tile.matrix.number


def check(held: HeldTile) -> None:
    for part in held.parts:
        assert bool((part == number_of(held) % 251).all())


def sweep(stream: WeightStream, take: Callable[[HeldTile], None]) -> list[int]:
    """One sweep; experts' tiles go to ``take``, which has to see to it that they are released."""
    seen = []
    stream.begin_sweep(100)
    for module in stream.modules:
        if not module.routed:
            for tile, _ in stream.tiles(module):
                seen.append(tile.matrix.number)  # type: ignore[attr-defined]
            continue
        for held in stream.held(module, torch.full((EXPERTS,), 9), idle):
            seen.append(number_of(held))
            take(held)
    return seen


def numbers(modules: tuple[Module, ...]) -> list[int]:
    return [tile.matrix.number for module in modules for tile in module.tiles]  # type: ignore[attr-defined]


class Holders:
    """Threads that keep each tile a while and look at it before they release it."""

    def __init__(self, count: int) -> None:
        self.wrong: list[BaseException] = []
        self._tiles: deque[HeldTile | None] = deque()
        self._filled = threading.Semaphore(0)
        self._threads = [threading.Thread(target=self._run, args=(0.0005 * n,)) for n in range(count)]
        for thread in self._threads:
            thread.start()

    def __call__(self, held: HeldTile | None) -> None:
        self._tiles.append(held)
        self._filled.release()

    def _run(self, seconds: float) -> None:
        while True:
            self._filled.acquire()
            held = self._tiles.popleft()
            if held is None:
                return
            held.begin()
            time.sleep(seconds)
            try:
                check(held)
            except BaseException as error:  # for the test's own thread
                self.wrong.append(error)
            held.release()

    def end(self) -> None:
        for _ in self._threads:
            self(None)
        for thread in self._threads:
            thread.join()


@pytest.mark.parametrize("ring_bytes", [2 * 3 * PAGE, 6 * PAGE * 2, 1 << 20])
@pytest.mark.parametrize("resident_every", [0, 4])
def test_what_is_held_is_not_overwritten_and_all_of_the_ring_comes_back(ring_bytes: int, resident_every: int) -> None:
    modules = layer_modules(layers=3, experts=EXPERTS)
    tiles = [tile for module in modules for tile in module.tiles]
    stream, reader = make_stream(
        modules, ring_bytes=ring_bytes, resident=tiles[::resident_every] if resident_every else []
    )
    reader.slow = True
    holders = Holders(3)
    for _ in range(4):
        assert sweep(stream, holders) == numbers(modules)
    holders.end()
    assert holders.wrong == []
    stream.reset()
    ring = stream._host.ring
    assert ring is not None
    assert ring.used == 0
    reader.close()


def test_reads_go_on_as_soon_as_the_last_tile_of_a_read_is_released() -> None:
    modules = layer_modules(layers=1, experts=EXPERTS)
    stream, reader = make_stream(modules, ring_bytes=4 * 3 * PAGE)
    kept: list[HeldTile] = []
    counted = []

    def keep_three(held: HeldTile) -> None:
        kept.append(held)
        counted.append(len(reader.reads))
        if len(kept) > 3:
            check(kept[0])
            kept.pop(0).release()

    stream.begin_sweep(100)
    for module in stream.modules:
        if module.routed:
            tiles = stream.held(module, torch.full((EXPERTS,), 9), idle)
            for held in tiles:
                keep_three(held)
                if held.tile is module.tiles[-1]:
                    break
            threading.Timer(0.05, lambda: [held.release() for held in kept]).start()
            assert next(tiles, None) is None  # ends when the last is released, not before
        else:
            for _ in stream.tiles(module):
                pass
    assert stream._holds.count == 0
    assert counted == sorted(counted)
    assert counted[-1] > counted[0]


def waited(idle_since: Callable[[], float | None]) -> float:
    """Seconds that a stream counts where a read of an expert takes 0.05 s."""
    modules = layer_modules(layers=1, experts=EXPERTS)
    stream, reader = make_stream(modules, ring_bytes=1 << 20)
    stream.begin_sweep(0)  # nothing is read ahead of the router
    counts = torch.zeros(EXPERTS, dtype=torch.int64)
    counts[5] = 3
    seconds = 0.0
    for module in stream.modules:
        if not module.routed:
            for _ in stream.tiles(module):
                pass
            continue
        reader.hold = True
        threading.Timer(0.05, reader.release_all).start()
        before = stream.statistics.wait_seconds
        for held in stream.held(module, counts, idle_since):
            check(held)
            held.release()
        seconds = stream.statistics.wait_seconds - before
    return seconds


def test_a_wait_for_a_read_counts_only_while_nothing_is_computed() -> None:
    began = time.perf_counter()
    assert waited(lambda: None) == 0.0  # something was computed all the while
    assert waited(lambda: began) >= 0.03
    assert waited(time.perf_counter) <= 0.03  # until just now


def test_a_failed_sweep_gives_everything_back() -> None:
    modules = layer_modules(layers=2, experts=EXPERTS)
    stream, reader = make_stream(modules, ring_bytes=1 << 18)
    held: list[HeldTile] = []
    reader.fail = StorageError("input/output error")
    with pytest.raises(StorageError):
        sweep(stream, held.append)
    reader.fail = None
    for tile in held:
        tile.release()
    stream.reset()

    def fail(tile: HeldTile) -> None:
        held.append(tile)
        if len(held) == 5:
            raise ValueError("a bug in a kernel")

    held.clear()
    with pytest.raises(ValueError, match="a bug"):
        sweep(stream, fail)
    for tile in held:
        tile.release()
    stream.reset()
    assert sweep(stream, lambda tile: tile.release()) == numbers(modules)


def test_an_abort_ends_a_sweep_that_waits_for_tiles_to_be_released() -> None:
    modules = layer_modules(layers=1, experts=EXPERTS)
    stream, _ = make_stream(modules, ring_bytes=2 * 3 * PAGE)
    held: list[HeldTile] = []
    threading.Timer(0.05, stream.abort).start()
    with pytest.raises(StreamAborted):
        sweep(stream, held.append)  # the ring is soon full of tiles that nobody releases
    assert held


def test_an_expert_that_would_fill_the_ring_is_not_held() -> None:
    modules = layer_modules(layers=1, experts=EXPERTS)
    routed = next(module for module in modules if module.routed)
    expert = 2 * PAGE * 2  # two tiles, each rounded up to whole blocks of the disk at both ends, at most
    assert make_stream(modules, ring_bytes=4 * expert)[0].can_hold(routed)
    assert not make_stream(modules, ring_bytes=2 * 3 * PAGE)[0].can_hold(routed)
    assert make_stream(modules, ring_bytes=None, resident=[t for m in modules for t in m.tiles])[0].can_hold(routed)


def test_the_last_tile_of_an_expert_says_so() -> None:
    modules = layer_modules(layers=1, experts=EXPERTS)
    stream, _ = make_stream(modules, ring_bytes=1 << 20)
    last: list[tuple[str, bool]] = []

    def note(held: HeldTile) -> None:
        last.append((held.tile.role, held.last))
        held.release()

    sweep(stream, note)
    assert set(last) == {("gate_up", False), ("down", True)}


def test_its_owner_is_woken_when_all_of_a_shipment_is_back_or_nothing_is_held() -> None:
    given_back: list[Shipment] = []
    holds = Holds(given_back.append)
    first, second = (Shipment((), 1, Tier.DISK, {}) for _ in range(2))
    for shipment in (first, first, second, None):
        holds.hold(shipment)
    holds.leave(first)
    assert holds.block_room
    holds.returned(first)
    assert not holds.wait(0.01)
    holds.returned(first)
    assert holds.wait(0.01)
    assert given_back == [first]
    assert not holds.block_room
    holds.returned(second)
    assert holds.wait(0.01)
    assert given_back == [first]  # the other has not been passed by: more of it may be held
    assert holds.count == 1
    holds.returned(None)
    assert holds.wait(0.01)
    assert holds.count == 0
    holds.leave(second)
    assert given_back == [first, second]


def test_a_full_ring_is_not_asked_again_until_something_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    modules = layer_modules(layers=2, experts=EXPERTS)
    stream, _ = make_stream(modules, ring_bytes=4 * 3 * PAGE)
    asked = []
    original = HostTier.fetch
    monkeypatch.setattr(HostTier, "fetch", lambda self, tiles: asked.append(tiles) or original(self, tiles))
    stream.begin_sweep(100)
    for module in stream.modules[:-1]:
        if not module.routed:
            for _ in stream.tiles(module):
                pass
            continue
        for held in stream.held(module, torch.full((EXPERTS,), 9), idle):
            before = len(asked)
            stream.pump()
            stream.pump()
            assert len(asked) == before
            held.release()
    assert len(asked) > len(modules)
