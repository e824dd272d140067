"""KV pages of paused sequences, spilled and brought back as they were or not at all.

One record is one page in all layers: a header and, behind it, the pool's bytes of that page. The header says whose page
it is, which, how much of it counts, and of which hold; its checksum covers itself and the pages. What is read back must
say exactly what was asked for, so that a damaged record, one of another slot, or one left from an earlier hold counts
as lost. The caller then computes the sequence again.
"""

from __future__ import annotations

import secrets
import struct
import threading
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from batchgen_lite.offload.devices.host import HostDevice
from batchgen_lite.offload.devices.protocol import Device, Lane
from batchgen_lite.offload.kv import KVPool
from batchgen_lite.offload.pages import PAGE_TOKENS, pages_for
from batchgen_lite.offload.readers.alignment import DEFAULT_ALIGNMENT
from batchgen_lite.offload.spill_file import SpillStatistics

# magic, nonce of the run, number of the hold, sequence, first position, positions, layers, bytes of the pages
_HEADER = struct.Struct("<8s16sQQQIIQ")
_CHECKSUM = struct.Struct("<I")
_MAGIC = b"BGLSPIL1"
HEADER_BYTES = 128  # keeps the pages behind it aligned
MEASURED_BYTES = 16 << 20  # of writing or reading, from which its own rate is believed


def record_bytes(pool: KVPool) -> int:
    """Bytes of the record of one page."""
    return HEADER_BYTES + sum(tensor[0].numel() * tensor.element_size() for tensor in pool.tensors())


def spill_staging(page_bytes: int) -> int:
    """Bytes of memory that spilling takes, for pages of ``page_bytes`` in all layers."""
    return -(-(HEADER_BYTES + page_bytes) // DEFAULT_ALIGNMENT) * DEFAULT_ALIGNMENT


@dataclass(frozen=True, slots=True)
class _Held:
    """What is kept of a sequence: its slots in order of position."""

    number: int
    positions: int
    slots: tuple[int, ...]


class SpillStore(Protocol):
    """Where records lie: a spill file, or host memory. None of it raises for a store that is full or broken."""

    slot_bytes: int
    statistics: SpillStatistics

    @property
    def free(self) -> int:
        """Records that may still be written at present."""
        ...

    def write(self, record: memoryview) -> int | None:
        """Store ``record`` and return its slot; None if that cannot be done."""
        ...

    def read(self, slot: int, record: memoryview) -> bool:
        """Fill ``record`` with what is stored in ``slot``; False if that cannot be read."""
        ...

    def release(self, slot: int) -> None:
        """``slot`` may be written again."""
        ...

    def close(self) -> None:
        """Nothing is kept. Idempotent."""
        ...


class Spill:
    """The spilled pages of ``pool``, which lies on ``device``, in ``store``, whose records are ``record_bytes(pool)``.

    ``rate``: bytes/s assumed of the store until its own are known. Holding and restoring are for the thread that owns
    the device, between sweeps; forgetting is for any thread.
    """

    def __init__(self, pool: KVPool, store: SpillStore, rate: float, device: Device | None = None) -> None:
        self.store = store
        self.page_bytes = record_bytes(pool) - HEADER_BYTES
        self._tensors = pool.tensors()
        self._layers = len(pool.keys)
        self._rate = rate
        self._device = device or HostDevice()
        self._staging = self._device.host_memory(store.slot_bytes)
        self._views: list[torch.Tensor] = []
        at = HEADER_BYTES
        for tensor in self._tensors:
            end = at + tensor[0].numel() * tensor.element_size()
            self._views.append(self._staging.tensor[at:end].view(tensor.dtype).view(tensor.shape[1:]))
            at = end
        self._end = at
        self._nonce = secrets.token_bytes(16)
        self._number = 0
        self._held: dict[int, _Held] = {}
        self._lock = threading.Lock()

    @property
    def free_pages(self) -> int:
        return self.store.free

    @property
    def seconds_per_page(self) -> float:
        """To write a page and to read it back, by what the disk has shown so far."""
        done = self.store.statistics
        write, read = self._rate, self._rate
        if done.bytes_written >= MEASURED_BYTES and done.write_seconds > 0:
            write = done.bytes_written / done.write_seconds
        if done.bytes_read >= MEASURED_BYTES and done.read_seconds > 0:
            read = done.bytes_read / done.read_seconds
        return self.store.slot_bytes / write + self.store.slot_bytes / read

    def hold(self, sequence: int, pages: Sequence[int], positions: int) -> bool:
        """Write the ``pages`` that hold ``positions`` positions of ``sequence``; all or none (False)."""
        with self._lock:
            self._forget(sequence)
            self._number += 1
            held = _Held(self._number, positions, ())
            for number in range(pages_for(positions)):
                self._transfer(
                    Lane.COPY_OUT,
                    [(tensor[pages[number]], view) for view, tensor in zip(self._views, self._tensors, strict=True)],
                )
                self._seal(sequence, number, held)
                slot = self.store.write(self._staging.view)
                if slot is None:
                    for taken in held.slots:
                        self.store.release(taken)
                    return False
                held = _Held(held.number, positions, (*held.slots, slot))
            self._held[sequence] = held
            self.store.statistics.holds += 1
            return True

    def restore(self, sequence: int, pages: Sequence[int]) -> bool:
        """Fill ``pages`` with what ``hold`` wrote; nothing is kept. False: what came back is something else, and the
        pages hold garbage."""
        with self._lock:
            held = self._held.get(sequence)
            if held is None:
                return False
            try:
                return all(self._read(sequence, number, held, pages[number]) for number in range(len(held.slots)))
            finally:
                self._forget(sequence)

    def forget(self, sequence: int) -> None:
        """Nothing of ``sequence`` is wanted any more."""
        with self._lock:
            self._forget(sequence)

    def close(self) -> None:
        """Remove the file and give the memory back. Idempotent."""
        with self._lock:
            self._held.clear()
            self._views.clear()
            self._tensors.clear()
            self._staging.close()
            self.store.close()

    def _forget(self, sequence: int) -> None:
        held = self._held.pop(sequence, None)
        if held is not None:
            for slot in held.slots:
                self.store.release(slot)

    def _read(self, sequence: int, number: int, held: _Held, page: int) -> bool:
        """Bring one page back."""
        if not self.store.read(held.slots[number], self._staging.view):
            return False
        expected = self._header(sequence, number, held)
        stored = bytes(self._staging.view[: len(expected) + _CHECKSUM.size])
        if stored != expected + _CHECKSUM.pack(self._checksum(expected)):
            self.store.statistics.problem("a spilled page was not what had been written")
            return False
        self._transfer(
            Lane.COPY_IN, [(view, tensor[page]) for view, tensor in zip(self._views, self._tensors, strict=True)]
        )
        return True

    def _transfer(self, lane: Lane, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Copy (source, target) pairs, behind what the last sweep computed; they are there when this returns."""
        self._device.wait(lane, self._device.record(Lane.COMPUTE))
        self._device.copy(lane, pairs).synchronize()

    def _header(self, sequence: int, number: int, held: _Held) -> bytes:
        first = number * PAGE_TOKENS
        count = min(PAGE_TOKENS, held.positions - first)
        return _HEADER.pack(
            _MAGIC, self._nonce, held.number, sequence, first, count, self._layers, self._end - HEADER_BYTES
        )

    def _seal(self, sequence: int, number: int, held: _Held) -> None:
        header = self._header(sequence, number, held)
        self._staging.view[: len(header)] = header
        self._staging.view[len(header) : len(header) + _CHECKSUM.size] = _CHECKSUM.pack(self._checksum(header))

    def _checksum(self, header: bytes) -> int:
        return zlib.crc32(self._staging.view[HEADER_BYTES : self._end], zlib.crc32(header))
