"""The device that a run is asked to compute on."""

from __future__ import annotations

import torch

from batchgen_lite.errors import UsageError
from batchgen_lite.offload.devices.host import HostDevice
from batchgen_lite.offload.devices.protocol import Device
from batchgen_lite.offload.devices.sim import DEFAULT_VRAM, SimDevice


def open_device(name: str, vram: int | None = None) -> Device:
    """ "cpu", "cuda", "cuda:N", "sim" (for tests), or "auto": a CUDA card where there is one, else the CPU.

    ``vram``: ceiling of device memory in bytes, None = what the card can spare. Raises UsageError for another name, for
    ``vram`` without a device that has memory of its own, and where the card that was asked for cannot be used, with the
    reason; BudgetError where ``vram`` is too small or too large for it.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cpu":
        if vram is not None:
            raise UsageError("--vram is for a device with memory of its own, but this run is on the CPU: give --ram")
        return HostDevice()
    if name == "sim":
        return SimDevice(DEFAULT_VRAM if vram is None else vram)
    kind, _, index = name.partition(":")
    if kind != "cuda" or (index and not index.isdecimal()):
        raise UsageError(f"--device is {name!r}: it must be auto, cpu, cuda, or cuda:N for the card of that number")
    from batchgen_lite.offload.devices.open_cuda import open_cuda

    return open_cuda(int(index or 0), vram)
