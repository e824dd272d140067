"""What a sweep hands to its device from the host: vectors once, index tables and embeddings every sweep, logits back.

Where the device computes in host memory nothing is copied: tensors are used where they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

import torch

from batchgen_lite.models.layers import FFNBiases, Skeleton
from batchgen_lite.offload.devices.protocol import Device, DeviceMemory, Event, Lane
from batchgen_lite.offload.workspace import Workspace

ALIGNMENT = 256  # bytes, of every vector on a device


class Placement:
    """Copies between a sweep's host data and one device. ``staging_bytes`` of host memory, as fast to copy from as the
    device has it: what ``fill`` and ``fetch`` go through; 0 where the device is not separate."""

    def __init__(self, device: Device, workspace: Workspace, staging_bytes: int) -> None:
        self.device = device
        self._workspace = workspace
        self._arena = device.host_memory(staging_bytes) if device.separate else None
        self._staging = torch.empty(0) if self._arena is None else self._arena.tensor.view(torch.float32)
        self._filled: Event | None = None

    def begin(self) -> None:
        """A sweep begins in a workspace that the last one's compute may still be using."""
        if self.device.separate:
            self.device.wait(Lane.COPY_IN, self.device.record(Lane.COMPUTE))

    def table(self, host: torch.Tensor) -> torch.Tensor:
        """``host``, any shape and dtype, for compute to read: in the workspace, until that is rewound. MemoryError when
        it has no room."""
        if not self.device.separate:
            return host
        target = self._workspace.take(*host.shape, dtype=host.dtype)
        if host.numel():
            self.device.wait(Lane.COMPUTE, self.device.copy(Lane.COPY_IN, [(host, target)]))
        return target

    def staged(self, rows: int, width: int) -> torch.Tensor:
        """fp32 [rows, width] on the host to be filled and given to ``fill``. MemoryError when it does not fit."""
        if self._filled is not None:
            self._filled.synchronize()  # long done, unless a sweep ended before its first layer
            self._filled = None
        if rows * width > self._staging.numel():
            raise MemoryError(f"{rows} rows of {width} in a staging buffer of {self._staging.nbytes} bytes")
        return self._staging[: rows * width].view(rows, width)

    def fill(self, staged: torch.Tensor, target: torch.Tensor) -> None:
        """Copy what ``staged`` gave to ``target``, alike, for compute to read."""
        self._filled = self.device.copy(Lane.COPY_IN, [(staged, target)])
        self.device.wait(Lane.COMPUTE, self._filled)

    def fetch(self, source: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        """``source`` fp32 [n, width] on the host, in blocks of (first row, rows), each valid until the next. The one
        place where a sweep waits for its device's results."""
        if not self.device.separate:
            yield 0, source
            return
        width = source.shape[1]
        at_once = max(1, self._staging.numel() // width)
        self.device.wait(Lane.COPY_OUT, self.device.record(Lane.COMPUTE))
        for first in range(0, source.shape[0], at_once):
            block = source[first : first + at_once]
            staged = self.staged(*block.shape)
            self.device.copy(Lane.COPY_OUT, [(block, staged)]).synchronize()
            yield first, staged

    def close(self) -> None:
        if self._filled is not None:
            self._filled.synchronize()
            self._filled = None
        self._staging = torch.empty(0)
        if self._arena is not None:
            self._arena.close()


def vectors_of(skeleton: Skeleton) -> list[torch.Tensor]:
    """Every vector of a model, in an order of its own."""
    found: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    _mapped(skeleton, note)
    return found


def skeleton_bytes(skeleton: Skeleton) -> int:
    """Bytes of device memory that its vectors take, each aligned."""
    return sum(-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for tensor in vectors_of(skeleton))


def skeleton_on(device: Device, skeleton: Skeleton) -> tuple[Skeleton, DeviceMemory | None]:
    """``skeleton`` with its vectors on ``device``, and the memory that holds them; itself where that is the host's.
    Raises BudgetError."""
    if not device.separate:
        return skeleton, None
    memory = device.allocate(max(ALIGNMENT, skeleton_bytes(skeleton)))
    at = 0
    pairs = []

    def place(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal at
        target = memory.tensor[at : at + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        at += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        if tensor.numel():
            pairs.append((tensor.contiguous(), target))
        return target

    placed = _mapped(skeleton, place)
    device.wait(Lane.COMPUTE, device.copy(Lane.COPY_IN, pairs))
    return placed, memory


def _mapped(skeleton: Skeleton, change: Any) -> Skeleton:
    """``skeleton`` with ``change`` applied to each of its tensors."""

    def changed(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return change(value)
        if isinstance(value, FFNBiases):
            return FFNBiases(changed(value.gate_up), changed(value.down))
        if isinstance(value, dict):
            return {key: changed(item) for key, item in value.items()}
        return value

    layers = tuple(
        replace(layer, **{field.name: changed(getattr(layer, field.name)) for field in fields(layer)})
        for layer in skeleton.layers
    )
    return replace(
        skeleton, layers=layers, final_norm=changed(skeleton.final_norm), head_bias=changed(skeleton.head_bias)
    )
