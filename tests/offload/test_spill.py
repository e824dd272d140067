"""Spilled KV pages come back bit for bit, or are known to be lost."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from batchgen_lite.offload.kv import KVPool, KVShape
from batchgen_lite.offload.spill import Spill, record_bytes
from batchgen_lite.offload.spill_file import SpillFile
from batchgen_lite.offload.spill_memory import SpillMemory

SHAPES = [KVShape(2, 8, 8), KVShape(1, 12, 0), KVShape(3, 4, 6)]
PAGES = 8


@pytest.fixture(params=[torch.float32, torch.bfloat16, torch.int8], ids=str)
def pool(request: pytest.FixtureRequest) -> Iterator[KVPool]:
    made = KVPool(SHAPES, PAGES, request.param)
    generator = torch.Generator().manual_seed(1)
    for tensor in made.tensors():
        if tensor.dtype == torch.int8:
            tensor.copy_(torch.randint(-127, 128, tensor.shape, generator=generator))
        else:
            tensor.copy_(torch.randn(tensor.shape, generator=generator))
    yield made
    made.close()


@pytest.fixture
def spill(pool: KVPool, tmp_path: Path) -> Iterator[Spill]:
    made = Spill(pool, SpillFile(tmp_path, record_bytes(pool), limit=1 << 20), 1e9)
    yield made
    made.close()
    assert list(tmp_path.iterdir()) == []


def contents(pool: KVPool, pages: list[int]) -> list[torch.Tensor]:
    return [tensor[pages].clone() for tensor in pool.tensors()]


def same(pool: KVPool, pages: list[int], before: list[torch.Tensor]) -> bool:
    return all(torch.equal(tensor[pages], old) for tensor, old in zip(pool.tensors(), before, strict=True))


def test_pages_come_back_to_other_pages_as_they_were(pool: KVPool, spill: Spill) -> None:
    before = contents(pool, [3, 0, 5])
    room = spill.free_pages
    assert spill.hold(7, [3, 0, 5, 1], 130)  # the fourth page is reserved only
    assert spill.free_pages == room - 3
    for tensor in pool.tensors():
        tensor.zero_()
    assert spill.restore(7, [2, 6, 1])
    assert same(pool, [2, 6, 1], before)
    assert spill.free_pages == room
    assert not spill.restore(7, [2, 6, 1])  # nothing is kept of it


def test_sequences_do_not_mix(pool: KVPool, spill: Spill) -> None:
    first, second = contents(pool, [0, 1]), contents(pool, [2, 3])
    spill.hold(1, [0, 1], 128)
    spill.hold(2, [2, 3], 65)
    spill.forget(1)
    spill.hold(3, [4], 1)
    assert spill.restore(2, [6, 7])
    assert same(pool, [6, 7], second)
    assert same(pool, [0, 1], first)
    spill.forget(3)
    spill.forget(99)


def test_host_memory_serves_as_well(pool: KVPool) -> None:
    store = SpillMemory(record_bytes(pool), 3)
    spill = Spill(pool, store, 1e9)
    before = contents(pool, [0, 1, 2])
    assert spill.hold(1, [0, 1], 128)
    assert not spill.hold(2, [2, 3], 128)
    assert spill.free_pages == 1
    assert spill.hold(2, [2], 64)
    assert spill.restore(1, [5, 6])
    assert spill.restore(2, [7])
    assert same(pool, [5, 6, 7], before)
    assert spill.free_pages == 3
    assert store.statistics.holds == 2
    assert store.statistics.problems == {"the memory for them was full": 1}
    spill.close()
    spill.close()


def damage(spill: Spill, at: int) -> None:
    """Turn one bit of the file around."""
    data = bytearray(spill.store.path.read_bytes())
    data[at] ^= 1
    spill.store.path.write_bytes(data)


def swap(spill: Spill, first: int, second: int) -> None:
    """Swap two records of the file by hand."""
    size = spill.store.slot_bytes
    data = spill.store.path.read_bytes()
    parts = [data[i : i + size] for i in range(0, len(data), size)]
    parts[first], parts[second] = parts[second], parts[first]
    spill.store.path.write_bytes(b"".join(parts))


@pytest.mark.parametrize("at", [0, 9, 30, 50, 64, 128, 1000, -200])
def test_a_damaged_page_is_found_out(at: int, pool: KVPool, spill: Spill) -> None:
    spill.hold(1, [0, 1], 128)
    damage(spill, spill.store.slot_bytes + (at if at >= 0 else record_bytes(pool) + at))
    assert not spill.restore(1, [2, 3])
    assert spill.store.statistics.problems == {"a spilled page was not what had been written": 1}


def test_swapped_pages_are_found_out(pool: KVPool, spill: Spill) -> None:
    spill.hold(1, [0, 1], 128)
    swap(spill, 0, 1)
    assert not spill.restore(1, [2, 3])
    spill.hold(2, [0], 64)
    spill.hold(3, [1], 64)
    swap(spill, 0, 1)
    assert not spill.restore(2, [2])
    assert not spill.restore(3, [3])


def test_a_record_of_an_earlier_hold_is_found_out(pool: KVPool, spill: Spill) -> None:
    """A write that the disk swallowed: what was there before looks right but for the number of the hold."""
    spill.hold(1, [0], 64)
    stale = spill.store.path.read_bytes()
    spill.forget(1)
    spill.hold(1, [0], 64)
    spill.store.path.write_bytes(stale)
    assert not spill.restore(1, [2])


def test_all_pages_or_none_are_held(pool: KVPool, tmp_path: Path) -> None:
    file = SpillFile(tmp_path, record_bytes(pool))
    spill = Spill(pool, SpillFile(tmp_path, record_bytes(pool), limit=2 * file.slot_bytes), 1e9)
    assert not spill.hold(1, [0, 1, 2], 192)
    assert spill.free_pages == 2
    assert spill.hold(1, [0, 1], 128)
    spill.close()
    file.close()


def test_rates_are_assumed_until_they_are_known(pool: KVPool, spill: Spill) -> None:
    size = spill.store.slot_bytes
    assert spill.seconds_per_page == pytest.approx(2 * size / 1e9)
    done = spill.store.statistics
    done.bytes_written, done.write_seconds = 1 << 30, 10.0
    assert spill.seconds_per_page == pytest.approx(size / 1e9 + size * 10 / (1 << 30))
