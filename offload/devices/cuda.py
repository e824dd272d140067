"""A CUDA card as a ``Device``: three streams, memory with a ceiling, pinned host memory, and no hidden waits.

Where the host does wait, and why each is right:

    event.synchronize()   called by the stream of weights before a reader refills host memory that a copy was reading,
                          and by whoever wants results on the host: the router's counts (once a routed layer, they
                          decide what to read next) and what the sampler needs (once a sweep)
    close()               the streams run dry before memory is given back

Nothing else does: copies are queued, waits are queued, allocation comes from memory that the process already holds.
The ceiling counts what the card's own bookkeeping takes beside our allocations (``CONTEXT_BYTES``), and holds for
torch's temporaries too, because the allocator itself is told of it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch

from batchgen_lite.errors import BudgetError
from batchgen_lite.offload.arena import Arena
from batchgen_lite.offload.budget import MIB, format_size
from batchgen_lite.offload.devices.pinned import PinnedMemory
from batchgen_lite.offload.devices.protocol import DeviceMemoryStatistics, Event, Lane
from batchgen_lite.offload.devices.streams import DeviceFull, StreamLayer

CONTEXT_BYTES = 512 * MIB
"""What a CUDA context with loaded kernels and cuBLAS takes of a card beside what is allocated: 250 to 500 MiB."""

TEMPORARY_BYTES = 128 * MIB
"""Left of the ceiling for what torch allocates and frees within an operation: tables, sorted assignments, copies."""

ALIGNMENT = 256

HEADROOM_SHARE, LEAST_HEADROOM = 0.06, 256 * MIB
"""Left free of what is free when no --vram is given: displays and browsers share a laptop's card."""

Pair = tuple[torch.Tensor, torch.Tensor]


def default_vram(free: int) -> int:
    """The ceiling when none is given: what is free beside the context, which is there already, less headroom."""
    return free + CONTEXT_BYTES - max(LEAST_HEADROOM, int(HEADROOM_SHARE * free))


class CudaMemory:
    """One allocation. Implements DeviceMemory."""

    def __init__(self, device: CudaDevice, tensor: torch.Tensor) -> None:
        self.nbytes = tensor.numel()
        self.tensor = tensor
        self._device: CudaDevice | None = device

    def close(self) -> None:
        """Give it back. The caller has seen to it that no lane uses it any more. Idempotent."""
        if self._device is None:
            return
        self._device._give_back(self.nbytes)
        self._device = None
        self.tensor = self.tensor.new_empty(0)


class CudaDevice:
    """Implements Device over a StreamLayer. ``vram``: bytes of the card that the process may use, context included;
    None: what is free, less headroom. ``name``: "cuda:N"; ``card``, ``capability``: what it is.

    Raises BudgetError when ``vram`` exceeds the card or does not even hold the context.
    """

    separate = True

    def __init__(
        self,
        layer: StreamLayer,
        *,
        vram: int | None = None,
        name: str = "cuda:0",
        card: str = "",
        capability: tuple[int, int] = (8, 0),
    ) -> None:
        self.name, self.card, self.capability = name, card, capability
        self.torch_device = layer.torch_device
        self._layer = layer
        free, total = layer.free_and_total()
        if vram is not None and vram > total:
            raise BudgetError(f"--vram {format_size(vram)} is more than {name} has ({format_size(total)}); lower it")
        self.vram = default_vram(free) if vram is None else vram
        self.capacity = self.vram - CONTEXT_BYTES - TEMPORARY_BYTES
        if self.capacity <= 0:
            raise BudgetError(
                f"--vram {format_size(self.vram)} does not hold the card's own context and temporaries of about "
                f"{format_size(CONTEXT_BYTES + TEMPORARY_BYTES)}; raise it, free the card, or use --device cpu"
            )
        layer.limit(self.capacity + TEMPORARY_BYTES)
        self._streams = {
            Lane.COPY_IN: layer.new_stream("copy in"),
            Lane.COMPUTE: layer.compute_stream(),
            Lane.COPY_OUT: layer.new_stream("copy out"),
        }
        self.pinned = PinnedMemory(layer)
        self._used = self._peak = 0
        # Temporaries among the operands must outlive the copy: torch would hand their memory to the next kernel.
        self._in_flight: deque[tuple[Event, Sequence[Pair]]] = deque()

    def allocate(self, nbytes: int, *, piecemeal: bool = False) -> CudaMemory:
        """See Device.allocate."""
        if nbytes <= 0:
            raise ValueError(f"device memory needs at least one byte, not {nbytes}")
        if self._used + nbytes > self.capacity:
            raise BudgetError(
                f"{format_size(nbytes)} of device memory asked for, but {format_size(self._used)} of the "
                f"{format_size(self.capacity)} that --vram {format_size(self.vram)} leaves are taken; raise --vram or "
                "make the batch smaller"
            )
        try:
            tensor = self._layer.allocate(nbytes)
        except DeviceFull as error:
            raise BudgetError(
                f"{self.name} refuses {format_size(nbytes)} within --vram {format_size(self.vram)}: {error}; another "
                "process may hold the rest, lower --vram"
            ) from error
        self._used += nbytes
        self._peak = max(self._peak, self._used)
        return CudaMemory(self, tensor)

    def _give_back(self, nbytes: int) -> None:
        self._used -= nbytes

    def host_memory(self, nbytes: int) -> Arena:
        """See Device.host_memory. What could not be pinned, and why, is in ``describe``."""
        return self.pinned.arena(nbytes)

    def copy(self, lane: Lane, pairs: Sequence[Pair]) -> Event:
        """See Device.copy. Raises ValueError for operands that differ or lie on the wrong sides."""
        if lane is Lane.COMPUTE:
            raise ValueError("copies are queued on a copy lane; compute copies within the device by itself")
        for source, target in pairs:
            self._check(lane, source, target)
        stream = self._streams[lane]
        for source, target in pairs:
            self._layer.copy(stream, source, target)
        event = self._layer.record(stream)
        while self._in_flight and self._in_flight[0][0].done():
            self._in_flight.popleft()
        self._in_flight.append((event, tuple(pairs)))
        return event

    def _check(self, lane: Lane, source: torch.Tensor, target: torch.Tensor) -> None:
        if source.shape != target.shape or source.dtype != target.dtype:
            raise ValueError(
                f"copy from {source.dtype} {list(source.shape)} to {target.dtype} {list(target.shape)}: "
                "both must be alike"
            )
        host, device = (source, target) if lane is Lane.COPY_IN else (target, source)
        if host.device.type != "cpu" or device.device != self.torch_device:
            raise ValueError(
                f"{lane.value} takes host memory and {self.torch_device}, not {source.device} and {target.device}"
            )

    def record(self, lane: Lane) -> Event:
        return self._layer.record(self._streams[lane])

    def wait(self, lane: Lane, event: Event) -> None:
        self._layer.wait(self._streams[lane], event)

    def memory(self) -> DeviceMemoryStatistics:
        """``peak`` includes torch's temporaries, ``used`` does not."""
        return DeviceMemoryStatistics(self.capacity, self._used, max(self._peak, self._layer.peak()))

    def describe(self) -> str:
        """One line for people."""
        what = f" ({self.card}, compute capability {self.capability[0]}.{self.capability[1]})" if self.card else ""
        return (
            f"{self.name}{what}, {format_size(self.vram)} budget of which "
            f"{format_size(self.vram - self.capacity)} for its context and temporaries, {self.pinned.describe()}"
        )

    def close(self) -> None:
        """See Device.close."""
        for stream in self._streams.values():
            self._layer.synchronize(stream)
        self._in_flight.clear()
