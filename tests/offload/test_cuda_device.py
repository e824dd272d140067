"""The CUDA device over a stream layer without a card: memory, its ceiling, pinning, and what it refuses."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from fake_streams import FakeStreams

from batchgen_lite.errors import BudgetError, UsageError
from batchgen_lite.offload.arena import PAGE
from batchgen_lite.offload.devices.cuda import CONTEXT_BYTES, TEMPORARY_BYTES, CudaDevice, default_vram
from batchgen_lite.offload.devices.cuda_streams import clear_last_error
from batchgen_lite.offload.devices.open_cuda import Cards, open_cuda, refusal
from batchgen_lite.offload.devices.protocol import Lane

GIB, MIB = 1 << 30, 1 << 20


def test_allocations_keep_to_the_ceiling() -> None:
    device = CudaDevice(FakeStreams(), vram=CONTEXT_BYTES + TEMPORARY_BYTES + 10 * MIB)
    first = device.allocate(6 * MIB)
    with pytest.raises(BudgetError, match=r"5\.00 MiB of device memory asked for, but 6\.00 MiB of the 10\.0 MiB"):
        device.allocate(5 * MIB)
    first.close()
    first.close()
    second = device.allocate(9 * MIB)
    assert second.tensor.data_ptr() % 256 == 0
    assert second.tensor.numel() == second.nbytes == 9 * MIB
    statistics = device.memory()
    assert (statistics.capacity, statistics.used, statistics.peak) == (10 * MIB, 9 * MIB, 9 * MIB)


def test_torch_is_told_of_the_ceiling() -> None:
    streams = FakeStreams()
    CudaDevice(streams, vram=2 * GIB)
    assert streams.limit_bytes == 2 * GIB - CONTEXT_BYTES


def test_without_a_budget_some_of_what_is_free_stays_free() -> None:
    streams = FakeStreams(free=7 * GIB, total=8 * GIB)
    device = CudaDevice(streams)
    assert device.vram == default_vram(7 * GIB)
    assert device.capacity < 7 * GIB - 256 * MIB


@pytest.mark.parametrize(
    ("vram", "message"),
    [
        (9 * GIB, r"--vram 9\.00 GiB is more than cuda:0 has \(8\.00 GiB\)"),
        (CONTEXT_BYTES, "does not hold the card's own"),
    ],
)
def test_budgets_that_cannot_be(vram: int, message: str) -> None:
    with pytest.raises(BudgetError, match=message):
        CudaDevice(FakeStreams(), vram=vram)


def test_a_card_that_others_filled_is_said() -> None:
    streams = FakeStreams(free=1 * GIB, total=8 * GIB)
    device = CudaDevice(streams, vram=6 * GIB)
    with pytest.raises(
        BudgetError, match=r"cuda:0 refuses 2\.00 GiB within --vram 6\.00 GiB: .* are free; another process"
    ):
        device.allocate(2 * GIB)
    assert device.memory().used == 0


def test_host_memory_is_pinned_in_place_and_unpinned() -> None:
    streams = FakeStreams()
    device = CudaDevice(streams, vram=GIB)
    arena = device.host_memory(3 * PAGE)
    assert streams.pinned == {arena.address: 3 * PAGE}
    arena.tensor.fill_(1)
    with pytest.raises(ValueError, match="pinned arena cannot be released"):
        arena.release(0, PAGE)
    arena.close()
    arena.close()
    assert streams.pinned == {}
    assert "pinned" in device.describe()


def test_refused_pinning_gives_plain_memory_and_the_reason() -> None:
    streams = FakeStreams(pin_limit=4 * PAGE)
    device = CudaDevice(streams, vram=GIB)
    pinned, plain = device.host_memory(4 * PAGE), device.host_memory(PAGE)
    assert list(streams.pinned) == [pinned.address]
    plain.tensor.fill_(7)
    plain.release(0, PAGE)
    assert int(plain.tensor.sum()) == 0
    assert "4.00 KiB of host memory not pinned (out of memory (2))" in device.describe()
    assert "WSL2" in device.describe()
    plain.close()
    pinned.close()
    assert streams.pinned == {}


def test_copies_refuse_operands_that_differ() -> None:
    device = CudaDevice(FakeStreams(), vram=GIB)
    memory = device.allocate(64).tensor
    with pytest.raises(ValueError, match="both must be alike"):
        device.copy(Lane.COPY_IN, [(torch.zeros(32, dtype=torch.uint8), memory)])
    with pytest.raises(ValueError, match="queued on a copy lane"):
        device.copy(Lane.COMPUTE, [(memory, memory)])


def test_copies_refuse_the_wrong_side() -> None:
    class OnCard(FakeStreams):
        torch_device = torch.device("meta")

    device = CudaDevice(OnCard(), vram=GIB)
    host, card = torch.zeros(8), torch.zeros(8, device="meta")
    with pytest.raises(ValueError, match="copy out takes host memory and meta, not cpu and meta"):
        device.copy(Lane.COPY_OUT, [(host, card)])
    with pytest.raises(ValueError, match="copy in takes host memory and meta, not meta and cpu"):
        device.copy(Lane.COPY_IN, [(card, host)])


def test_the_libraries_whose_last_error_is_cleared(tmp_path: Path) -> None:
    maps = tmp_path / "maps"
    maps.write_text(
        "7f00-7f01 r-xp 00000000 08:01 12  /srv/torch lib/libcudart-0d0da41a.so.12\n"
        "7f01-7f02 r--p 00000000 08:01 12  /srv/torch lib/libcudart-0d0da41a.so.12\n"
        "7f02-7f03 r-xp 00000000 08:01 13  /usr/lib/libcudart.so.13 (deleted)\n"
        "7f03-7f04 r-xp 00000000 00:00 0\n"
    )
    assert clear_last_error(maps) == ["/srv/torch lib/libcudart-0d0da41a.so.12", "/usr/lib/libcudart.so.13"]
    assert clear_last_error(tmp_path / "absent") == []


@pytest.mark.parametrize(
    ("index", "seen", "reason"),
    [
        (0, Cards(None, False), "this build of torch has no CUDA support; install a CUDA build of torch"),
        (0, Cards("12.8", False), "torch, built for CUDA 12.8, finds no card that it can use"),
        (2, Cards("12.8", True, (("A", (8, 9)), ("B", (12, 0)))), "there is no card 2; .* cuda:0 A, cuda:1 B"),
        (0, Cards("12.8", True, (("Old", (6, 1)),)), "Old has compute capability 6.1, but 7.0 is the oldest"),
        (0, Cards("13.0", True, (("V", (7, 0)),), ("sm_75", "compute_75")), r"7\.0, for which .* \(it has sm_75, comp"),
    ],
)
def test_why_a_card_cannot_be_used(index: int, seen: Cards, reason: str) -> None:
    found = refusal(index, seen)
    assert found is not None
    assert re.search(reason, found)


def test_cards_that_can() -> None:
    seen = Cards("12.8", True, (("Volta", (7, 0)), ("Ada", (8, 9))))
    assert refusal(0, seen) is None
    assert refusal(1, seen) is None


@pytest.mark.parametrize(
    ("target", "served"),
    [
        ("sm_80", [(8, 0), (8, 6)]),
        ("sm_86", [(8, 6)]),
        ("sm_90a", [(9, 0)]),
        ("sm_120", [(12, 0), (12, 1)]),
        ("compute_86", [(8, 6), (9, 0), (12, 0), (12, 1)]),
        ("something else", []),
    ],
)
def test_which_cards_a_build_of_torch_has_kernels_for(target: str, served: list[tuple[int, int]]) -> None:
    capabilities = [(7, 5), (8, 0), (8, 6), (9, 0), (12, 0), (12, 1)]
    seen = Cards("13.0", True, tuple((f"{major}.{minor}", (major, minor)) for major, minor in capabilities), (target,))
    assert [card for index, card in enumerate(capabilities) if refusal(index, seen) is None] == served


def test_asking_for_a_card_where_there_is_none_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UsageError, match=r"--device cuda:0 cannot be used: .*, or use --device cpu"):
        open_cuda(0, None)


def test_the_description_names_the_card() -> None:
    device = CudaDevice(FakeStreams(), vram=2 * GIB, name="cuda:1", card="RTX 4070 Laptop", capability=(8, 9))
    assert device.describe().startswith("cuda:1 (RTX 4070 Laptop, compute capability 8.9), 2.00 GiB budget of which")
