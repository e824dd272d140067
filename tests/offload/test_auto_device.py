"""``--device auto`` without a card: which machine gives which device, and what is said where a card cannot serve."""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_streams import FakeStreams

from batchgen_lite.errors import UsageError
from batchgen_lite.offload.devices import auto, cuda_streams, open_cuda
from batchgen_lite.offload.devices.names import check_vram, device_kind
from batchgen_lite.offload.devices.open_cuda import Cards
from batchgen_lite.offload.devices.select import open_device

GIB = 1 << 30
OLD, NEW = ("Old", (6, 1)), ("New", (8, 9))


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A machine with a CUDA driver."""
    node = tmp_path / "nvidiactl"
    node.touch()
    monkeypatch.setattr(auto, "CUDA_NODES", (node,))
    return monkeypatch


@pytest.mark.parametrize(
    ("seen", "reason"),
    [
        (Cards(None, False), "this build of torch has no CUDA support"),
        (Cards("12.8", False), "torch, built for CUDA 12.8, finds no card that it can use"),
        (Cards("12.8", True, (OLD,)), "Old has compute capability 6.1, but 7.0 is the oldest that is served"),
        (
            Cards("13.0", True, (NEW,), ("sm_90",)),
            "New has compute capability 8.9, for which this build",
        ),
    ],
)
def test_a_card_that_cannot_serve_leaves_the_cpu_and_its_reason(
    machine: pytest.MonkeyPatch, seen: Cards, reason: str
) -> None:
    machine.setattr(open_cuda, "look", lambda: seen)
    assert device_kind("auto") == "cpu"
    device = open_device("auto")
    assert device.name == "cpu"
    assert f"the CPU, in the process's own memory; no card, because {reason}" in device.describe()
    with pytest.raises(UsageError, match=r"--device auto is the CPU here \(.*\): give --ram") as refused:
        check_vram("auto", GIB)
    assert reason in str(refused.value)
    with pytest.raises(UsageError, match="--device cuda:0 cannot be used"):  # who asks for the card is told
        open_device("cuda")
    assert "no card" not in open_device("cpu").describe()


def test_the_first_card_that_serves_is_taken(machine: pytest.MonkeyPatch) -> None:
    machine.setattr(open_cuda, "look", lambda: Cards("12.8", True, (OLD, NEW)))
    machine.setattr(cuda_streams, "TorchStreams", lambda index: FakeStreams())
    chosen: list[int] = []
    machine.setattr("torch.cuda.set_device", chosen.append)
    assert device_kind("auto") == "cuda"
    assert open_device("auto", 2 * GIB).describe().startswith("cuda:1 (New, compute capability 8.9)")
    assert chosen == [1]


def test_without_a_driver_torch_is_not_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto, "CUDA_NODES", (tmp_path / "absent",))
    monkeypatch.delattr(open_cuda, "look")
    assert device_kind("auto") == "cpu"
    assert open_device("auto").describe() == "the CPU, in the process's own memory"
