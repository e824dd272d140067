"""Order between the lanes of the CUDA device: every wait is needed, and enough of them are there.

The device is the real one; the streams below it run whatever is not forbidden (tests/support/fake_streams.py).
"""

from __future__ import annotations

import torch
from fake_streams import FakeStreams
from waits import goes_wrong_without, sites_of

from batchgen_lite.offload.devices.cuda import CudaDevice
from batchgen_lite.offload.devices.protocol import Event, Lane

SEEDS = range(60)
TILES, HOST_SLOTS, DEVICE_SLOTS, SLOT_BYTES = 12, 3, 2, 256


def pipeline(seed: int) -> bool:
    """Tiles go through a host ring and a device ring; each is doubled on the device, and comes back.

    The smallest thing that has every kind of reuse: of host memory that a reader refills, of device memory that a copy
    refills, of a result buffer that the next kernel overwrites, and of the answer on the host."""
    streams = FakeStreams(seed)
    device = CudaDevice(streams, vram=1 << 30)
    host = device.host_memory(HOST_SLOTS * SLOT_BYTES).tensor.view(HOST_SLOTS, SLOT_BYTES)
    ring = device.allocate(DEVICE_SLOTS * SLOT_BYTES).tensor.view(DEVICE_SLOTS, SLOT_BYTES)
    result = device.allocate(SLOT_BYTES).tensor
    answers = torch.zeros(TILES, SLOT_BYTES, dtype=torch.uint8)
    emptied: list[Event | None] = [None] * HOST_SLOTS
    used: list[Event | None] = [None] * DEVICE_SLOTS
    fetched: Event | None = None
    for tile in range(TILES):
        source, slot = tile % HOST_SLOTS, tile % DEVICE_SLOTS
        if (event := emptied[source]) is not None:
            event.synchronize()  # a reader knows nothing of lanes
        host[source].fill_(tile + 1)
        if (event := used[slot]) is not None:
            device.wait(Lane.COPY_IN, event)
        arrived = emptied[source] = device.copy(Lane.COPY_IN, [(host[source], ring[slot])])
        device.wait(Lane.COMPUTE, arrived)
        if fetched is not None:
            device.wait(Lane.COMPUTE, fetched)
        streams.launch(lambda slot=slot: torch.mul(ring[slot], 2, out=result))
        computed = used[slot] = device.record(Lane.COMPUTE)
        device.wait(Lane.COPY_OUT, computed)
        fetched = device.copy(Lane.COPY_OUT, [(result, answers[tile])])
    assert fetched is not None
    fetched.synchronize()
    return torch.equal(answers[:, 0], 2 * torch.arange(1, TILES + 1, dtype=torch.uint8))


def test_lanes_keep_order_only_where_an_event_says_so() -> None:
    sites = sites_of(pipeline, SEEDS)
    here = {site for site in sites if site[0] == "test_cuda_ordering.py"}
    assert sorted(what for _, _, what in here) == [
        "synchronize", "synchronize", "wait compute", "wait compute", "wait copy in", "wait copy out",
    ]  # fmt: skip
    for site in here:
        assert goes_wrong_without(site, pipeline, SEEDS), f"nothing notices that {site} is missing"


def test_temporaries_outlive_the_copy_that_reads_them() -> None:
    """What a copy reads may be a temporary: the device keeps it until the copy is done, and no longer."""
    import weakref

    streams = FakeStreams(0)
    for stream in streams.streams:
        stream.haste = 0.0
    device = CudaDevice(streams, vram=1 << 30)
    target = torch.zeros(4)
    temporary = torch.ones(4)
    alive = weakref.ref(temporary)
    event = device.copy(Lane.COPY_OUT, [(temporary, target)])
    del temporary
    assert alive() is not None
    streams.streams[-1].queue.clear()  # the lambda of the fake itself holds it, too
    event.happened = True  # type: ignore[attr-defined]
    device.copy(Lane.COPY_OUT, [(torch.ones(4), target)])
    assert alive() is None


def test_the_host_waits_where_it_has_to_and_nowhere_else() -> None:
    streams = FakeStreams(1)
    device = CudaDevice(streams, vram=1 << 30)
    memory = device.allocate(64)
    host = device.host_memory(64)
    event = device.copy(Lane.COPY_IN, [(host.tensor, memory.tensor)])
    device.wait(Lane.COMPUTE, event)
    device.record(Lane.COMPUTE)
    device.memory()
    memory.close()
    assert streams.synchronize_calls == 0
    device.close()
    assert streams.synchronize_calls == 3  # each lane once
