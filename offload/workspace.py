"""Scratch memory for activations: one arena, taken from in stages and rewound, so that nothing is allocated in a sweep.

A layer's two halves never live at the same time, and logits live after all layers; rewinding lets them share memory.
"""

from __future__ import annotations

from math import prod

import torch

from batchgen_lite.offload.devices.host import HostDevice
from batchgen_lite.offload.devices.protocol import Device, DeviceMemory

ALIGNMENT = 64  # bytes: a cache line


class Lent:
    """A piece of someone else's memory. Implements DeviceMemory."""

    def __init__(self, tensor: torch.Tensor) -> None:
        """``tensor``: uint8 [nbytes]."""
        self.nbytes, self.tensor = tensor.numel(), tensor

    def close(self) -> None:
        """It is not ours to give back."""


class Workspace:
    """Tensors carved from ``nbytes`` of memory, last taken first given back. One thread at a time."""

    def __init__(self, nbytes: int, device: Device | None = None, memory: DeviceMemory | None = None) -> None:
        """In memory of ``device``; None: of the host. ``memory``: what to use instead of new memory."""
        self.memory = memory or (device or HostDevice()).allocate(-(-nbytes // ALIGNMENT) * ALIGNMENT)
        self._used = 0  # bytes
        self.peak = 0  # bytes

    def take(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """An uninitialised contiguous tensor. MemoryError when the workspace is too small: the caller's sweep is larger
        than it was planned for."""
        nbytes = prod(shape) * dtype.itemsize
        end = self._used + -(-nbytes // ALIGNMENT) * ALIGNMENT
        if end > self.memory.nbytes:
            raise MemoryError(f"{end} bytes of activations in a workspace of {self.memory.nbytes}")
        tensor = self.memory.tensor[self._used : self._used + nbytes].view(dtype).view(shape)
        self._used = end
        self.peak = max(self.peak, end)
        return tensor

    @property
    def free(self) -> int:
        """Bytes that can still be taken."""
        return self.memory.nbytes - self._used

    def part(self, nbytes: int) -> Workspace:
        """``nbytes`` of it as a workspace of its own, for another thread; gone when this one is rewound."""
        return Workspace(nbytes, memory=Lent(self.take(nbytes, dtype=torch.uint8)))

    def mark(self) -> int:
        """Where the workspace stands; ``rewind`` to it gives back everything taken since."""
        return self._used

    def rewind(self, mark: int) -> None:
        self._used = mark

    def close(self) -> None:
        self.memory.close()
