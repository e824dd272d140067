"""A simulated accelerator: host memory that is treated as if it were not.

It has an arena of its own with a hard ceiling, and is out to catch who forgets what a real device needs:

- `inside` refuses an operand outside the arena, by address: everything has to be copied there first;
- copies run as late as the events allow: when somebody waits for them. Until then their target holds POISON, bytes that
  are NaN in every float format; so memory that is handed out or given back, too;
- every access of a lane is held against the other lanes' earlier ones: if no event orders them (vector clocks), that is
  an OrderError, even where this run would have come out right.

Compute runs at once, on the calling thread. There is no clock here: bandwidths are a matter of the scheduler's tests.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from batchgen_lite.errors import BudgetError
from batchgen_lite.kernels.launch import OperandError
from batchgen_lite.offload.arena import Arena
from batchgen_lite.offload.budget import format_size
from batchgen_lite.offload.devices.intervals import Intervals
from batchgen_lite.offload.devices.protocol import DeviceMemoryStatistics, Event, Lane

ALIGNMENT = 256
POISON = 0xFF
DEFAULT_VRAM = 1 << 30
Clock = dict[Lane, int]
Pair = tuple[torch.Tensor, torch.Tensor]


class OrderError(RuntimeError):
    """Two lanes touch the same memory and no event says which comes first: a bug of the caller's."""


@dataclass(slots=True, eq=False)
class SimEvent:
    """Implements Event. ``clock``: how far every lane has come when this has."""

    device: SimDevice
    lane: Lane
    clock: Clock
    polls: int = 0

    def done(self) -> bool:
        """The first look comes too early, always."""
        self.polls += 1
        if self.polls > 1:
            self.synchronize()
        return self.device._happened(self)

    def synchronize(self) -> None:
        self.device._run_until(self)
        self.device._host_knows(self)


class SimMemory:
    """A piece of the arena. Implements DeviceMemory."""

    def __init__(self, device: SimDevice, start: int, nbytes: int) -> None:
        self.nbytes = nbytes
        self.tensor = device._arena.tensor[start : start + nbytes]
        self._device: SimDevice | None = device
        self._start = start
        self.tensor.fill_(POISON)

    def close(self) -> None:
        """Give it back, poisoned. Idempotent."""
        if self._device is not None:
            self.tensor.fill_(POISON)
            self._device._give_back(self._start, self.nbytes)
            self._device = None
            self.tensor = torch.empty(0, dtype=torch.uint8)


class SimDevice:
    """Implements Device. ``vram``: its ceiling in bytes."""

    name = "sim"
    torch_device = torch.device("cpu")
    separate = True

    def __init__(self, vram: int = DEFAULT_VRAM) -> None:
        self.capacity = vram // ALIGNMENT * ALIGNMENT
        if self.capacity <= 0:
            raise BudgetError(f"--vram {vram} is no memory for a device; give at least a few MiB")
        self._arena = Arena(self.capacity)
        self._free = [(0, self.capacity)]  # (start, stop), ascending, never touching
        self._used = self._peak = 0
        self._clock: dict[Lane, Clock] = {lane: dict.fromkeys(Lane, 0) for lane in Lane}
        self._host: Clock = dict.fromkeys(Lane, 0)
        self._queue: dict[Lane, deque[tuple[int, Callable[[], object]]]] = {lane: deque() for lane in Lane}
        self._ran: Clock = dict.fromkeys(Lane, 0)
        self._touched: dict[tuple[Lane, bool], Intervals[int]] = {  # (lane, whether it writes) -> its latest access
            (lane, writes): Intervals() for lane in Lane for writes in (False, True)
        }

    # -- memory ---------------------------------------------------------------------------------------------------

    def allocate(self, nbytes: int, *, piecemeal: bool = False) -> SimMemory:
        """See Device.allocate; first fit."""
        size = -(-nbytes // ALIGNMENT) * ALIGNMENT
        if nbytes <= 0:
            raise ValueError(f"device memory needs at least one byte, not {nbytes}")
        for i, (start, stop) in enumerate(self._free):
            if stop - start >= size:
                self._free[i : i + 1] = [(start + size, stop)] if stop - start > size else []
                self._used += size
                self._peak = max(self._peak, self._used)
                return SimMemory(self, start, nbytes)
        largest = max((stop - start for start, stop in self._free), default=0)
        raise BudgetError(
            f"{format_size(nbytes)} of device memory asked for, but of the {format_size(self.capacity)} that --vram "
            f"gives {format_size(self._used)} are taken and {format_size(largest)} are free in one piece; raise --vram "
            "or make the batch smaller"
        )

    def _give_back(self, start: int, nbytes: int) -> None:
        size = -(-nbytes // ALIGNMENT) * ALIGNMENT
        self._used -= size
        for touched in self._touched.values():
            touched.clear(start, start + size)
        merged: list[tuple[int, int]] = []
        for begin, end in sorted([*self._free, (start, start + size)]):
            if merged and merged[-1][1] == begin:
                merged[-1] = (merged[-1][0], end)
            else:
                merged.append((begin, end))
        self._free = merged

    def host_memory(self, nbytes: int) -> Arena:
        """See Device.host_memory."""
        return Arena(nbytes)

    def memory(self) -> DeviceMemoryStatistics:
        """See Device.memory."""
        return DeviceMemoryStatistics(self.capacity, self._used, self._peak)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` lies in the arena, every byte of it; an empty one lies anywhere."""
        start, stop = self._span(tensor)
        return start >= stop or (start >= 0 and stop <= self.capacity)

    def inside(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """``tensor`` itself; OperandError, which names the operand, if it does not lie on the device."""
        if not self.holds(tensor):
            raise OperandError(
                f"{name}: {tuple(tensor.shape)} {tensor.dtype} lies in host memory, but the operation runs on "
                f"{self.name}; copy it there first"
            )
        return tensor

    def _span(self, tensor: torch.Tensor) -> tuple[int, int]:
        """[start, stop) of the bytes that ``tensor`` reaches, relative to the arena."""
        if tensor.numel() == 0:
            return 0, 0
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        start = tensor.data_ptr() - self._arena.address
        return start, start + (last + 1) * tensor.element_size()

    # -- lanes ----------------------------------------------------------------------------------------------------

    def copy(self, lane: Lane, pairs: Sequence[Pair]) -> SimEvent:
        """See Device.copy. Raises ValueError for operands that differ, OperandError for wrong sides, OrderError."""
        if lane is Lane.COMPUTE:
            raise ValueError("copies are queued on a copy lane; compute copies within the device by itself")
        for source, target in pairs:
            if source.shape != target.shape or source.dtype != target.dtype:
                raise ValueError(
                    f"copy from {source.dtype} {list(source.shape)} to {target.dtype} {list(target.shape)}: both must "
                    "be alike"
                )
            host, own = (source, target) if lane is Lane.COPY_IN else (target, source)
            self.inside(f"{lane.value}, {'target' if lane is Lane.COPY_IN else 'source'}", own)
            if host.numel() and self.holds(host):
                raise OperandError(f"{lane.value}: its host side lies on the device; copies go between the two")
        tick = self._tick(lane)
        self._run_known(lane)
        for _, target in pairs:
            if lane is Lane.COPY_IN:
                self._access(lane, target, writes=True)
            _poison(target)
        if lane is Lane.COPY_OUT:
            for source, _ in pairs:
                self._access(lane, source, writes=False)
        self._queue[lane].append((tick, lambda: _copy(pairs)))
        return SimEvent(self, lane, dict(self._clock[lane]))

    def computes(self, name: str, tensor: torch.Tensor, *, writes: bool = False) -> torch.Tensor:
        """Compute reads (or ``writes``) ``tensor`` now: refused outside the arena, and where a copy is not ordered
        against it."""
        self.inside(name, tensor)
        self._tick(Lane.COMPUTE)
        self._access(Lane.COMPUTE, tensor, writes=writes)
        return tensor

    def record(self, lane: Lane) -> SimEvent:
        """See Device.record."""
        return SimEvent(self, lane, dict(self._clock[lane]))

    def wait(self, lane: Lane, event: Event) -> None:
        """See Device.wait. Compute runs at once, so what it waits for has to run now."""
        assert isinstance(event, SimEvent)
        if lane is Lane.COMPUTE:
            self._run_until(event)
        _merge(self._clock[lane], event.clock)
        if lane is not Lane.COMPUTE and event.lane is not lane:
            # What is queued from now on runs behind the event: running the event's part first is always allowed.
            self._queue[lane].append((self._tick(lane), lambda: self._run_until(event)))

    def close(self) -> None:
        """See Device.close."""
        for lane in Lane:
            self._run_until(self.record(lane))

    def _tick(self, lane: Lane) -> int:
        """The number of the next piece of work on ``lane``, which comes behind all that the host has seen."""
        _merge(self._clock[lane], self._host)
        self._clock[lane][lane] += 1
        if lane is Lane.COMPUTE:
            self._ran[lane] = self._clock[lane][lane]
        return self._clock[lane][lane]

    def _run_until(self, event: SimEvent) -> None:
        queue, limit = self._queue[event.lane], event.clock[event.lane]
        while queue and queue[0][0] <= limit:
            tick, work = queue.popleft()
            work()
            self._ran[event.lane] = tick

    def _run_known(self, lane: Lane) -> None:
        """Run what ``lane``'s next work is ordered behind on other lanes: its target may be what they read."""
        for other, known in self._clock[lane].items():
            if other is not lane:
                self._run_until(SimEvent(self, other, {other: known}))

    def _happened(self, event: SimEvent) -> bool:
        return not self._queue[event.lane] or self._queue[event.lane][0][0] > event.clock[event.lane]

    def _host_knows(self, event: SimEvent) -> None:
        _merge(self._host, event.clock)

    def _access(self, lane: Lane, tensor: torch.Tensor, *, writes: bool) -> None:
        """Note an access, after holding it against those of the other lanes that it conflicts with."""
        start, stop = self._span(tensor)
        known = self._clock[lane]
        for (other, wrote), touched in self._touched.items():
            if other is lane or not (writes or wrote):
                continue
            for begin, end, tick in touched.over(start, stop):
                if tick > known[other]:
                    raise OrderError(
                        f"{lane.value} {'writes' if writes else 'reads'} bytes [{max(begin, start)}, {min(end, stop)}) "
                        f"of the device, which {other.value} {'writes' if wrote else 'reads'}: no event orders the two"
                    )
        self._touched[lane, writes].set(start, stop, known[lane])

    def describe(self) -> str:
        """One line for people."""
        return f"{self.name}, a simulated accelerator with {format_size(self.capacity)} of memory"


def _merge(clock: Clock, other: Clock) -> None:
    for lane, tick in other.items():
        clock[lane] = max(clock[lane], tick)


def _copy(pairs: Sequence[Pair]) -> None:
    with torch.inference_mode():  # whoever waits may not be in it, and what was made there may be written only there
        for source, target in pairs:
            target.copy_(source)


def _poison(tensor: torch.Tensor) -> None:
    if tensor.is_contiguous():
        tensor.view(-1).view(torch.uint8).fill_(POISON)
    elif tensor.is_floating_point():
        tensor.fill_(float("nan"))
