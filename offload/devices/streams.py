"""The seam under the CUDA device: streams, events, copies and memory, as the driver gives them.

Everything that decides about order is in ``cuda.py`` and above; what is below this seam only does as it is told. So the
order can be tested where no card is: tests/support/fake_streams.py implements the seam with queues that run each
stream's work as late or as early as its waits allow, and a missing wait shows as a wrong byte.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

from batchgen_lite.offload.devices.protocol import Event

Stream = Any
"""A queue of the layer's own making; only handed back to it."""


class DeviceFull(Exception):
    """The device has no memory left for an allocation; the message says how much was free."""


class StreamLayer(Protocol):
    """One card. Nothing here blocks the host but ``synchronize`` and an event's ``synchronize``."""

    torch_device: torch.device

    def compute_stream(self) -> Stream:
        """The stream on which torch and Triton queue what the engine computes."""
        ...

    def new_stream(self, purpose: str) -> Stream:
        """One that is ordered against no other, not even against the legacy default stream."""
        ...

    def copy(self, stream: Stream, source: torch.Tensor, target: torch.Tensor) -> None:
        """Queue a copy between host and device. With plain (not pinned) host memory it may return later, with the
        bytes taken; the order on the device is the same."""
        ...

    def record(self, stream: Stream) -> Event:
        """A new event behind everything queued on ``stream`` so far."""
        ...

    def wait(self, stream: Stream, event: Event) -> None:
        """What is queued on ``stream`` from now on starts behind ``event``."""
        ...

    def synchronize(self, stream: Stream) -> None:
        """Block the host until everything queued on ``stream`` has run."""
        ...

    def allocate(self, nbytes: int) -> torch.Tensor:
        """uint8 [nbytes] on the device, 256-byte aligned. Raises DeviceFull."""
        ...

    def limit(self, nbytes: int) -> None:
        """From now on refuse what would make all allocations of this process, temporary ones too, exceed ``nbytes``."""
        ...

    def free_and_total(self) -> tuple[int, int]:
        """Bytes of device memory: free now (of all processes), and in all."""
        ...

    def peak(self) -> int:
        """The most bytes that allocations of this process, temporary ones too, have held at once."""
        ...

    def pin(self, address: int, nbytes: int) -> str | None:
        """Pin host memory in place; None when done, else why it is refused (it then stays as it was)."""
        ...

    def unpin(self, address: int) -> None:
        """Undo ``pin``."""
        ...
