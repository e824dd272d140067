"""What travels between host and device beside weights and KV: embeddings in, router counts and logits out.

Both directions go through host memory of the device's own making (pinned where possible), in pieces of a fixed size, so
that neither a prompt's length nor the vocabulary decides how much of it is needed. Where the device's memory is the
host's, nothing is copied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from batchgen_lite.offload.devices.protocol import Device, Event, Lane

COUNT_BYTES = 1 << 14
"""For small answers: the offsets of 4,095 experts."""


class Transfers:
    """One model's traffic with one device. ``staging_bytes``: host memory for it, two pieces that travel in turn."""

    def __init__(self, device: Device, staging_bytes: int) -> None:
        self.device = device
        self._bytes = (staging_bytes - COUNT_BYTES) // 2 // 64 * 64
        self._arena = device.host_memory(staging_bytes) if device.separate else None
        self._halves: list[torch.Tensor] = []
        self._counts = torch.empty(0)
        if self._arena is not None:
            if self._bytes <= 0:
                raise ValueError(f"{staging_bytes} bytes are no staging memory; more than {COUNT_BYTES} are needed")
            self._halves = [self._arena.tensor[at : at + self._bytes] for at in (0, self._bytes)]
            self._counts = self._arena.tensor[2 * self._bytes :][:COUNT_BYTES]
        self._used: list[Event | None] = [None, None]

    def _piece(self, half: int, rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
        """Host memory [rows, width] whose last use is over: the host waits for it."""
        event, self._used[half] = self._used[half], None
        if event is not None:
            event.synchronize()
        return self._halves[half][: rows * width * dtype.itemsize].view(dtype).view(rows, width)

    def rows_at_once(self, width: int, dtype: torch.dtype) -> int:
        """How many rows a piece holds. Raises ValueError if not even one."""
        rows = self._bytes // (width * dtype.itemsize)
        if rows == 0:
            raise ValueError(f"a row of {width} {dtype} exceeds the staging memory of {self._bytes} bytes")
        return rows

    def to_device(self, target: torch.Tensor, fill: Callable[[int, int, torch.Tensor], None]) -> None:
        """Have ``fill(first, end, rows)`` make rows on the host, and queue their copies to ``target`` [n, width]. What
        is computed from now on sees them; what was queued before has seen what was there before."""
        count, width = target.shape
        if self._arena is None:
            fill(0, count, target)
            return
        device = self.device
        device.wait(Lane.COPY_IN, device.record(Lane.COMPUTE))
        step = self.rows_at_once(width, target.dtype)
        for number, first in enumerate(range(0, count, step)):
            end = min(first + step, count)
            piece = self._piece(number % 2, end - first, width, target.dtype)
            fill(first, end, piece)
            event = device.copy(Lane.COPY_IN, [(piece, target[first:end])])
            self._used[number % 2] = event
            device.wait(Lane.COMPUTE, event)

    def to_host(self, answer: torch.Tensor) -> torch.Tensor:
        """``answer`` (small, contiguous) on the host, when all that leads to it is computed: the host waits."""
        if self._arena is None:
            return answer
        piece = self._counts[: answer.nbytes].view(answer.dtype).view(answer.shape)
        self._fetch(answer, piece).synchronize()
        return piece.clone()

    def blocks(self, rows: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        """(first row, rows on the host) of ``rows`` [n, width], each valid until the next; the one behind is on its
        way meanwhile. The host waits for each."""
        count, width = rows.shape
        if self._arena is None:
            yield 0, rows
            return
        step = self.rows_at_once(width, rows.dtype)
        starts = list(range(0, count, step))

        def fetch(number: int) -> tuple[torch.Tensor, Event]:
            part = rows[starts[number] : starts[number] + step]
            piece = self._piece(number % 2, part.shape[0], width, rows.dtype)
            return piece, self._fetch(part, piece)

        coming = fetch(0)
        for number, first in enumerate(starts):
            piece, event = coming
            event.synchronize()
            if number + 1 < len(starts):
                coming = fetch(number + 1)
            yield first, piece

    def _fetch(self, source: torch.Tensor, piece: torch.Tensor) -> Event:
        device = self.device
        device.wait(Lane.COPY_OUT, device.record(Lane.COMPUTE))
        return device.copy(Lane.COPY_OUT, [(source, piece)])

    def close(self) -> None:
        """Give the host memory back; the device's lanes have run dry."""
        self._halves.clear()
        if self._arena is not None:
            self._arena.close()
            self._arena = None
