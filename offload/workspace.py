"""Scratch memory for activations: one arena, taken from in stages and rewound, so that nothing is allocated in a sweep.

A layer's two halves never live at the same time, and logits live after all layers; rewinding lets them share memory.
"""

from __future__ import annotations

from math import prod

import torch

from batchgen_lite.offload.arena import Arena

ALIGNMENT = 64  # bytes: a cache line


class Workspace:
    """fp32 tensors carved from ``nbytes`` of memory, last taken first given back. One thread at a time."""

    def __init__(self, nbytes: int) -> None:
        self.arena = Arena(-(-nbytes // ALIGNMENT) * ALIGNMENT)
        self._floats = self.arena.tensor.view(torch.float32)
        self._used = 0  # floats
        self.peak = 0  # bytes

    def take(self, *shape: int) -> torch.Tensor:
        """An uninitialised contiguous fp32 tensor. MemoryError when the workspace is too small: the caller's sweep
        is larger than it was planned for."""
        size = prod(shape)
        step = ALIGNMENT // 4
        end = self._used + -(-size // step) * step
        if end * 4 > self.arena.nbytes:
            raise MemoryError(f"{end * 4} bytes of activations in a workspace of {self.arena.nbytes}")
        tensor = self._floats[self._used : self._used + size].view(shape)
        self._used = end
        self.peak = max(self.peak, end * 4)
        return tensor

    def mark(self) -> int:
        """Where the workspace stands; ``rewind`` to it gives back everything taken since."""
        return self._used

    def rewind(self, mark: int) -> None:
        self._used = mark

    def close(self) -> None:
        self._floats = torch.empty(0)
        self.arena.close()
