"""The CPU as a device: its memory is the host's, so nothing is copied and nothing has to be waited for."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from batchgen_lite.offload.arena import Arena
from batchgen_lite.offload.devices.protocol import DeviceMemoryStatistics, Lane


class Happened:
    """An event that has come. Implements Event."""

    def done(self) -> bool:
        return True

    def synchronize(self) -> None:
        return


class HostMemory:
    """An arena. Implements DeviceMemory."""

    def __init__(self, device: HostDevice, nbytes: int, *, huge_pages: bool) -> None:
        self.nbytes = nbytes
        self._arena = Arena(nbytes, huge_pages=huge_pages)
        self._device: HostDevice | None = device
        self.tensor = self._arena.tensor

    def release(self, start: int, stop: int) -> None:
        """See Arena.release."""
        self._arena.release(start, stop)

    def releasable(self, start: int, stop: int) -> int:
        """See Arena.releasable."""
        return self._arena.releasable(start, stop)

    def close(self) -> None:
        """Give it back. Idempotent."""
        if self._device is not None:
            self._device._used -= self.nbytes
            self._device = None
            self.tensor = torch.empty(0, dtype=torch.uint8)
            self._arena.close()


class HostDevice:
    """Implements Device. Its budget is the process's, ``--ram``, which the planner divides; so ``allocate`` refuses
    only what the operating system refuses. ``no_card``: why it was taken although a card may be there, else ""."""

    name = "cpu"
    torch_device = torch.device("cpu")
    separate = False

    def __init__(self, no_card: str = "") -> None:
        self._no_card = no_card
        self._used = self._peak = 0

    def allocate(self, nbytes: int, *, piecemeal: bool = False) -> HostMemory:
        """See Device.allocate: zeroed, page-aligned; pages cost nothing until they are touched."""
        memory = HostMemory(self, nbytes, huge_pages=not piecemeal)
        self._used += nbytes
        self._peak = max(self._peak, self._used)
        return memory

    def host_memory(self, nbytes: int) -> Arena:
        """See Device.host_memory."""
        return Arena(nbytes)

    def copy(self, lane: Lane, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Happened:
        """See Device.copy: done at once."""
        for source, target in pairs:
            target.copy_(source)
        return Happened()

    def record(self, lane: Lane) -> Happened:
        """See Device.record."""
        return Happened()

    def wait(self, lane: Lane, event: object) -> None:
        """See Device.wait."""

    def memory(self) -> DeviceMemoryStatistics:
        """``capacity`` 0: no ceiling of its own."""
        return DeviceMemoryStatistics(0, self._used, self._peak)

    def describe(self) -> str:
        """One line for people."""
        return "the CPU, in the process's own memory" + (f"; no card, because {self._no_card}" if self._no_card else "")

    def close(self) -> None:
        """See Device.close."""
