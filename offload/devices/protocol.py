"""What the runtime asks of a device: memory with a ceiling, copies on their own lanes, and events that order them.

Three lanes run beside each other: copy-in (host to device), compute, and copy-out (device to host). Work on one lane
runs in the order in which it was queued; between lanes nothing is ordered unless an event says so:

    record(lane)        an event that comes after everything queued on the lane so far
    wait(lane, event)   nothing queued on the lane from now on starts before the event; costs the host nothing
    event.synchronize() the host blocks until the event has come; the one wait that a sweep may notice

A stretch of memory is reused only behind an event of whoever used it last: a ring slot on the device behind the
compute that read it, a slot in the host's ring behind the copy that emptied it, and, as neither readers nor kvikio
know of lanes, a slot that a reader fills only after the host itself has seen the event.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import torch

from batchgen_lite.offload.arena import Arena


class Lane(Enum):
    """A queue of work on a device."""

    COPY_IN = "copy in"
    COMPUTE = "compute"
    COPY_OUT = "copy out"


class Event(Protocol):
    """A point in a lane's queue."""

    def done(self) -> bool:
        """Whether everything before it has happened. Never blocks."""
        ...

    def synchronize(self) -> None:
        """Block the host until it has."""
        ...


class DeviceMemory(Protocol):
    """A fixed piece of device memory. ``tensor``: uint8 [nbytes] on the device, 256-byte aligned."""

    nbytes: int
    tensor: torch.Tensor

    def close(self) -> None:
        """Give it back. Idempotent."""
        ...


@dataclass(frozen=True, slots=True)
class DeviceMemoryStatistics:
    """Bytes: ``capacity`` is the ceiling that allocations keep to, ``used`` and ``peak`` what they hold and held."""

    capacity: int
    used: int
    peak: int


class Device(Protocol):
    """Owned by the engine thread. ``separate``: its memory is not the host's, so weights and KV have to be copied;
    where it is False, ``allocate`` gives host arenas, copies are not needed and the lanes do nothing."""

    name: str
    torch_device: torch.device
    separate: bool

    def allocate(self, nbytes: int, *, piecemeal: bool = False) -> DeviceMemory:
        """``piecemeal``: for memory that is filled and given back bit by bit; it lies in small pages then.

        Raises BudgetError, with both figures, beyond the ceiling or when the device refuses."""
        ...

    def host_memory(self, nbytes: int) -> Arena:
        """Host memory that copies can use at full speed: pinned where that is possible, else plain."""
        ...

    def copy(self, lane: Lane, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Event:
        """Queue copies (source, destination), equal shapes and dtypes, on COPY_IN or COPY_OUT; the event behind them.

        Both tensors are kept until then. What lies in memory of ours (rings, residents, workspace, KV) is for the
        caller's events to order."""
        ...

    def record(self, lane: Lane) -> Event:
        """An event behind everything queued on ``lane`` so far."""
        ...

    def wait(self, lane: Lane, event: Event) -> None:
        """Nothing queued on ``lane`` from now on starts before ``event``."""
        ...

    def memory(self) -> DeviceMemoryStatistics: ...

    def describe(self) -> str:
        """One line for people."""
        ...

    def close(self) -> None:
        """Wait for all lanes. Memory allocated from the device is closed by its owners."""
        ...
