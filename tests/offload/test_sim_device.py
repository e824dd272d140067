"""The simulated device refuses what a real one could not do, and shows what a real one would do only now and then."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from batchgen_lite.errors import BudgetError
from batchgen_lite.kernels.launch import OperandError
from batchgen_lite.offload.devices.protocol import Lane
from batchgen_lite.offload.devices.sim import OrderError, SimDevice

KIB = 1 << 10


@pytest.fixture
def device() -> Iterator[SimDevice]:
    device = SimDevice(64 * KIB)
    yield device
    device.close()


def floats(device: SimDevice, count: int = 16) -> torch.Tensor:
    return device.allocate(4 * count).tensor.view(torch.float32)


# -- memory -----------------------------------------------------------------------------------------------------------


def test_the_ceiling_is_hard_and_says_both_figures(device: SimDevice) -> None:
    held = device.allocate(40 * KIB)
    with pytest.raises(
        BudgetError, match=r"32\.0 KiB of device memory asked for, but of the 64\.0 KiB .* 40\.0 KiB are"
    ):
        device.allocate(32 * KIB)
    assert device.memory().used == 40 * KIB
    held.close()
    held.close()
    device.allocate(64 * KIB)
    statistics = device.memory()
    assert (statistics.capacity, statistics.used, statistics.peak) == (64 * KIB, 64 * KIB, 64 * KIB)


def test_pieces_given_back_in_any_order_become_one_again(device: SimDevice) -> None:
    pieces = [device.allocate(1000) for _ in range(64)]
    assert all(piece.tensor.data_ptr() % 256 == 0 for piece in pieces)
    for piece in pieces[1::2] + pieces[::2]:
        piece.close()
    assert device.memory().used == 0
    assert device.allocate(64 * KIB).nbytes == 64 * KIB


def test_no_ceiling_at_all_is_refused() -> None:
    with pytest.raises(BudgetError, match="is no memory for a device"):
        SimDevice(100)


def test_fresh_memory_and_memory_given_back_hold_nan(device: SimDevice) -> None:
    memory = device.allocate(256)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert bool(memory.tensor.view(dtype).isnan().all())
    kept = memory.tensor.view(torch.float32)
    kept.fill_(1.0)
    memory.close()
    assert bool(kept.isnan().all())  # whoever still uses it shows


# -- operands ---------------------------------------------------------------------------------------------------------


def test_operands_in_host_memory_are_refused_by_name(device: SimDevice) -> None:
    inside = floats(device)
    assert device.inside("x", inside) is inside
    assert device.inside("columns of x", inside.view(4, 4).t()).shape == (4, 4)
    with pytest.raises(OperandError, match=r"weights of qkv: \(16,\) torch.float32 lies in host memory"):
        device.inside("weights of qkv", torch.zeros(16))
    with pytest.raises(OperandError, match="a copy"):
        device.inside("a copy", inside.clone())
    device.inside("nothing", torch.zeros(0))  # has no address


def test_copies_on_the_wrong_side_are_refused(device: SimDevice) -> None:
    there, here = floats(device), torch.zeros(16)
    with pytest.raises(OperandError, match="copy in, target"):
        device.copy(Lane.COPY_IN, [(here, here.clone())])
    with pytest.raises(OperandError, match="its host side lies on the device"):
        device.copy(Lane.COPY_IN, [(there, there)])
    with pytest.raises(OperandError, match="copy out, source"):
        device.copy(Lane.COPY_OUT, [(here, here.clone())])
    with pytest.raises(ValueError, match="both must be alike"):
        device.copy(Lane.COPY_IN, [(here[:8], there)])
    with pytest.raises(ValueError, match="both must be alike"):
        device.copy(Lane.COPY_IN, [(here.double(), there)])
    with pytest.raises(ValueError, match="on a copy lane"):
        device.copy(Lane.COMPUTE, [(here, there)])


# -- order ------------------------------------------------------------------------------------------------------------


def test_a_copy_comes_as_late_as_it_may_and_its_target_is_nan_until_then(device: SimDevice) -> None:
    there, here = floats(device), torch.ones(16)
    event = device.copy(Lane.COPY_IN, [(here, there)])
    assert bool(there.isnan().all())
    here.fill_(2.0)  # too early: the copy has not happened
    device.wait(Lane.COMPUTE, event)
    assert there.tolist() == [2.0] * 16


def test_an_event_is_done_when_somebody_has_looked_twice(device: SimDevice) -> None:
    there = floats(device)
    event = device.copy(Lane.COPY_IN, [(torch.ones(16), there)])
    assert not event.done()
    assert event.done()
    assert there.tolist() == [1.0] * 16


def test_waiting_for_one_copy_leaves_later_ones_waiting(device: SimDevice) -> None:
    first, second = floats(device), floats(device)
    early = device.copy(Lane.COPY_IN, [(torch.ones(16), first)])
    late = device.copy(Lane.COPY_IN, [(torch.ones(16), second)])
    early.synchronize()
    assert not bool(first.isnan().any())
    assert bool(second.isnan().all())
    late.synchronize()
    assert not bool(second.isnan().any())


def test_compute_that_does_not_wait_for_a_copy_is_an_error(device: SimDevice) -> None:
    there = floats(device)
    event = device.copy(Lane.COPY_IN, [(torch.ones(16), there)])
    with pytest.raises(OrderError, match=r"compute reads bytes .* which copy in writes"):
        device.computes("x", there)
    device.wait(Lane.COMPUTE, event)
    device.computes("x", there)


def test_a_copy_over_what_compute_may_still_read_is_an_error(device: SimDevice) -> None:
    there = floats(device)
    device.wait(Lane.COMPUTE, device.copy(Lane.COPY_IN, [(torch.ones(16), there)]))
    device.computes("x", there)
    with pytest.raises(OrderError, match=r"copy in writes bytes .* which compute reads"):
        device.copy(Lane.COPY_IN, [(torch.ones(16), there)])
    device.wait(Lane.COPY_IN, device.record(Lane.COMPUTE))
    device.copy(Lane.COPY_IN, [(torch.ones(16), there)])


def test_what_the_host_has_seen_is_ordered_before_all_that_it_does_next(device: SimDevice) -> None:
    there = floats(device)
    device.copy(Lane.COPY_IN, [(torch.ones(16), there)]).synchronize()
    device.computes("x", there)
    device.record(Lane.COMPUTE).synchronize()
    device.copy(Lane.COPY_IN, [(torch.ones(16), there)])


def test_order_goes_through_a_third_lane(device: SimDevice) -> None:
    there = floats(device)
    device.wait(Lane.COPY_OUT, device.copy(Lane.COPY_IN, [(torch.ones(16), there)]))
    device.wait(Lane.COMPUTE, device.record(Lane.COPY_OUT))
    device.computes("x", there)


def test_results_leave_behind_the_compute_that_wrote_them(device: SimDevice) -> None:
    there, here = floats(device), torch.zeros(16)
    device.computes("result", there, writes=True).fill_(3.0)
    with pytest.raises(OrderError, match="copy out reads"):
        device.copy(Lane.COPY_OUT, [(there, here)])
    device.wait(Lane.COPY_OUT, device.record(Lane.COMPUTE))
    event = device.copy(Lane.COPY_OUT, [(there, here)])
    assert bool(here.isnan().all())
    event.synchronize()
    assert here.tolist() == [3.0] * 16


def test_memory_given_back_carries_no_order_into_its_next_life(device: SimDevice) -> None:
    memory = device.allocate(256)
    device.computes("x", memory.tensor)
    memory.close()
    again = device.allocate(256)
    device.copy(Lane.COPY_IN, [(torch.ones(256, dtype=torch.uint8), again.tensor)])
