"""The device that a run is asked to compute on."""

from __future__ import annotations

from batchgen_lite.offload.devices.auto import Automatic, automatic
from batchgen_lite.offload.devices.host import HostDevice
from batchgen_lite.offload.devices.names import card_index, check_vram, device_kind
from batchgen_lite.offload.devices.protocol import Device
from batchgen_lite.offload.devices.sim import DEFAULT_VRAM, SimDevice


def open_device(name: str, vram: int | None = None) -> Device:
    """ "cpu", "cuda", "cuda:N", "sim" (for tests), or "auto": the first CUDA card that can be used, else the CPU, whose
    description then says why no card.

    ``vram``: ceiling of device memory in bytes, None = what the card can spare. Raises UsageError for another name, for
    ``vram`` without a device that has memory of its own, and where the card that was asked for cannot be used, with the
    reason; BudgetError where ``vram`` is too small or too large for it.
    """
    kind = device_kind(name)
    check_vram(name, vram)
    auto = automatic() if name == "auto" else Automatic()
    if kind == "cpu":
        return HostDevice(auto.reason)
    if kind == "sim":
        return SimDevice(DEFAULT_VRAM if vram is None else vram)
    from batchgen_lite.offload.devices.open_cuda import open_cuda

    return open_cuda(card_index(name) if auto.card is None else auto.card, vram)
