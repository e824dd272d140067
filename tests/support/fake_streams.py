"""A stream layer without a card, out to catch whoever forgets to wait.

    streams = FakeStreams(seed=7)
    device = CudaDevice(streams, vram=1 << 30)

Work that is queued does not run when it is queued. It runs some time later, on whichever stream the seed favours, as
long as that stream's waits allow it; or, at the latest, when the host synchronises with an event behind it, and then
only that much. Each seed has a temper: streams that hurry (their work runs as soon as it may) and streams that dawdle
(nothing of theirs runs until somebody needs it). Order that only an event enforces is thus kept only where there is
one. "Device" memory is the host's, filled with 0xFF (NaN as floats).
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable

import torch

from batchgen_lite.offload.devices.streams import DeviceFull

POISON = 0xFF
FREE, TOTAL = 7 << 30, 8 << 30


class FakeEvent:
    """Implements Event."""

    def __init__(self, layer: FakeStreams) -> None:
        self.layer = layer
        self.happened = False

    def done(self) -> bool:
        self.layer.let_run()
        return self.happened

    def synchronize(self) -> None:
        self.layer.synchronize_calls += 1
        self.layer.run_until(self)
        self.layer.let_run()


class FakeStream:
    """A queue: of work, of waits, and of events to set."""

    def __init__(self, purpose: str, haste: float) -> None:
        self.purpose = purpose
        self.haste = haste
        self.queue: deque[tuple[str, object]] = deque()


class FakeStreams:
    """Implements StreamLayer. ``pin_limit``: bytes that may be pinned before it is refused. ``eager``: compute is what
    the calling thread does by itself, at once, and not queued here; so its stream never lags, and the others do."""

    torch_device = torch.device("cpu")

    def __init__(
        self,
        seed: int = 0,
        *,
        free: int = FREE,
        total: int = TOTAL,
        pin_limit: int | None = None,
        eager: bool = False,
    ) -> None:
        self.random = random.Random(seed)
        self.streams: list[FakeStream] = []
        self.compute = self.new_stream("compute")
        self.free, self.total = free, total
        self.allocated = self.limit_bytes = 0
        self.pinned: dict[int, int] = {}
        self.pin_limit = pin_limit
        self.eager = eager
        self.memory: list[torch.Tensor] = []
        self.synchronize_calls = 0
        self.copies = 0

    # -- what a StreamLayer does ----------------------------------------------------------------------------------

    def compute_stream(self) -> FakeStream:
        return self.compute

    def new_stream(self, purpose: str) -> FakeStream:
        self.streams.append(FakeStream(purpose, self.random.choice((0.0, 0.0, 0.3, 1.0, 1.0))))
        return self.streams[-1]

    def copy(self, stream: FakeStream, source: torch.Tensor, target: torch.Tensor) -> None:
        self.copies += 1
        self.launch(lambda: target.copy_(source), stream)

    def record(self, stream: FakeStream) -> FakeEvent:
        event = FakeEvent(self)
        stream.queue.append(("event", event))
        if self.eager and stream is self.compute:
            self.run_until(event)
        self.let_run()
        return event

    def wait(self, stream: FakeStream, event: FakeEvent) -> None:
        if self.eager and stream is self.compute:
            self.run_until(event)
            return
        stream.queue.append(("wait", event))

    def synchronize(self, stream: FakeStream) -> None:
        self.synchronize_calls += 1
        event = FakeEvent(self)
        stream.queue.append(("event", event))
        self.run_until(event)

    def allocate(self, nbytes: int) -> torch.Tensor:
        if self.allocated + nbytes > self.free:
            raise DeviceFull(f"{self.free - self.allocated} of {self.total} bytes of the card are free")
        self.allocated += nbytes
        raw = torch.full((nbytes + 256,), POISON, dtype=torch.uint8)
        skip = -raw.data_ptr() % 256
        self.memory.append(raw)
        return raw[skip : skip + nbytes]

    def limit(self, nbytes: int) -> None:
        self.limit_bytes = nbytes

    def free_and_total(self) -> tuple[int, int]:
        return self.free, self.total

    def peak(self) -> int:
        return 0

    def pin(self, address: int, nbytes: int) -> str | None:
        if self.pin_limit is not None and sum(self.pinned.values()) + nbytes > self.pin_limit:
            return "out of memory (2)"
        self.pinned[address] = nbytes
        return None

    def unpin(self, address: int) -> None:
        del self.pinned[address]

    # -- what runs when -------------------------------------------------------------------------------------------

    def launch(self, work: Callable[[], object], stream: FakeStream | None = None) -> None:
        """Queue ``work``, on the compute stream unless told otherwise: what a kernel launch is."""
        (stream or self.compute).queue.append(("work", work))
        self.let_run()

    def let_run(self) -> None:
        """Time passes: every stream goes on for as long as its haste and its waits let it."""
        moved = True
        while moved:
            moved = False
            for stream in self.random.sample(self.streams, len(self.streams)):
                if self._ready(stream) and self.random.random() < stream.haste:
                    self._step(stream)
                    moved = True

    def run_until(self, event: FakeEvent) -> None:
        """Run what ``event`` needs and no more."""
        while not event.happened:
            stream = next((s for s in self.streams if ("event", event) in s.queue), None)
            assert stream is not None, "the host waits for an event that was never recorded: it would hang"
            kind, item = stream.queue[0]
            if kind == "wait" and not item.happened:  # type: ignore[attr-defined]
                self.run_until(item)  # type: ignore[arg-type]
            self._step(stream)

    def _ready(self, stream: FakeStream) -> bool:
        if not stream.queue:
            return False
        kind, item = stream.queue[0]
        return kind != "wait" or item.happened  # type: ignore[attr-defined]

    def _step(self, stream: FakeStream) -> None:
        kind, item = stream.queue.popleft()
        if kind == "work":
            item()  # type: ignore[operator]
        elif kind == "event":
            item.happened = True  # type: ignore[attr-defined]
