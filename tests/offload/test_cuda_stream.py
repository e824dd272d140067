"""Weights through three tiers on the CUDA device: the stream's own waits, each of them needed.

The stream, its tiers and the device are the real ones; below them streams run whatever no event forbids. A module's
compute is a note of what it finds where the tile should be.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from fake_streams import FakeStreams
from streams import HeldReader, layer_modules
from waits import Site, goes_wrong_without, sites_of

from batchgen_lite.offload.device_tier import DeviceTier, device_footprint
from batchgen_lite.offload.devices.cuda import CudaDevice
from batchgen_lite.offload.ring import Ring
from batchgen_lite.offload.stream import WeightStream
from batchgen_lite.offload.tiles import Tile

SEEDS = range(24)
SWEEPS = 3
MODULES = layer_modules(2, 4)
TILES = [tile for module in MODULES for tile in module.tiles]


def sweeps(
    seed: int,
    *,
    host_ring: int,
    device_ring: int,
    on_host: tuple[int, ...] = (),
    on_device: tuple[int, ...] = (),
    abandoned: bool = False,
) -> bool:
    """Some sweeps, every tile used where it lies; whether each held its own bytes when compute came to it.

    ``on_host``, ``on_device``: numbers of tiles that stay there; rings in bytes. ``abandoned``: the second sweep ends
    in the middle, as it does when memory is short or the user stops it."""
    streams = FakeStreams(seed)
    device = CudaDevice(streams, vram=1 << 30)
    reader = HeldReader()
    ring = Ring(device.allocate(device_ring), 256)
    tier = DeviceTier(device, ring, [TILES[number] for number in on_device])
    host = Ring(device.host_memory(host_ring), reader.alignment)
    stream = WeightStream(MODULES, reader, host, [TILES[number] for number in on_host], device=tier)
    seen: list[tuple[int, int]] = []
    expected: list[tuple[int, int]] = []

    def look(tile: Tile, parts: list[torch.Tensor]) -> None:
        values = torch.cat(parts).unique().tolist()
        seen.append((tile.matrix.number, values[0] if len(values) == 1 else -1))  # type: ignore[attr-defined]

    for sweep in range(SWEEPS):
        stream.begin_sweep(64)
        for module in MODULES:
            if abandoned and sweep == 1 and module is MODULES[2]:
                stream.reset()
                break
            # The first sweep touches every expert, so that later ones are read ahead; the last one leaves some out.
            counts = torch.tensor([9, 9, 0, 9]) if sweep == SWEEPS - 1 else torch.full((4,), 9)
            for tile, parts in stream.tiles(module, counts if module.routed else None):
                streams.launch(partial(look, tile, parts))
                expected.append((tile.matrix.number, tile.matrix.number % 251))  # type: ignore[attr-defined]
    device.close()
    stream.close()
    reader.close()
    return seen == expected


LARGEST = max(device_footprint(tile) for tile in TILES)

SCENARIOS = {
    "everything passes, rings hold a few tiles": partial(sweeps, host_ring=32 << 10, device_ring=24 << 10),
    "the smallest rings": partial(sweeps, host_ring=16 << 10, device_ring=LARGEST),
    "some stay on the host": partial(sweeps, host_ring=32 << 10, device_ring=24 << 10, on_host=(0, 3, 4, 5)),
    "one is abandoned": partial(sweeps, host_ring=32 << 10, device_ring=24 << 10, abandoned=True),
    "some stay on the device": partial(sweeps, host_ring=32 << 10, device_ring=24 << 10, on_device=(1, 2, 7, 13)),
}


@pytest.mark.parametrize("name", SCENARIOS)
def test_every_tile_is_there_when_compute_comes_to_it(name: str) -> None:
    sites_of(SCENARIOS[name], SEEDS)


def test_what_stays_on_the_device_costs_no_wait() -> None:
    streams = FakeStreams(5)
    device = CudaDevice(streams, vram=1 << 30)
    reader = HeldReader()
    tier = DeviceTier(device, None, TILES)
    stream = WeightStream(MODULES, reader, Ring(device.host_memory(1 << 20), reader.alignment), device=tier)
    waited = []
    for _ in range(3):
        stream.begin_sweep(64)
        for module in MODULES:
            for _ in stream.tiles(module, torch.full((4,), 9) if module.routed else None):
                streams.launch(lambda: None)
        waited.append(streams.synchronize_calls)
    assert waited == [0, 0, 0]
    device.close()
    stream.close()
    reader.close()


def test_every_wait_is_needed() -> None:
    met: dict[Site, set[str]] = {}
    for name, scenario in SCENARIOS.items():
        for site in sites_of(scenario, range(6)):
            if not site[0].startswith(("test_", "fake_")):
                met.setdefault(site, set()).add(name)
    kinds = {what for _, _, what in met}
    assert {"wait compute", "wait copy in", "synchronize"} <= kinds
    for site, names in met.items():
        if site[0] == "cuda.py":
            continue  # the device's own look at copies whose operands it may forget
        assert any(goes_wrong_without(site, SCENARIOS[name], SEEDS) for name in names), (
            f"nothing notices {site} missing"
        )
