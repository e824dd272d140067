"""Records of paused sequences' KV in host memory: what a spill file is, for a device that has memory of its own."""

from __future__ import annotations

import time

from batchgen_lite.offload.arena import Arena
from batchgen_lite.offload.readers.alignment import DEFAULT_ALIGNMENT
from batchgen_lite.offload.spill_file import SpillStatistics


class SpillMemory:
    """Slots of ``record_bytes``, rounded up, ``records`` of them, in an arena. Implements SpillStore."""

    def __init__(self, record_bytes: int, records: int) -> None:
        """Raises BudgetError when the operating system refuses the memory."""
        self.slot_bytes = -(-record_bytes // DEFAULT_ALIGNMENT) * DEFAULT_ALIGNMENT
        self.statistics = SpillStatistics()
        self._arena = Arena(self.slot_bytes * records)
        self._free = list(range(records - 1, -1, -1))

    @property
    def free(self) -> int:
        """Records that may still be written at present."""
        return len(self._free)

    def write(self, record: memoryview) -> int | None:
        """Store ``record`` (``slot_bytes``) and return its slot; None if there is no room."""
        if not self._free:
            self.statistics.problem("the memory for them was full")
            return None
        started, slot = time.monotonic(), self._free.pop()
        self._slot(slot)[:] = record
        self.statistics.bytes_written += self.slot_bytes
        self.statistics.write_seconds += time.monotonic() - started
        return slot

    def read(self, slot: int, record: memoryview) -> bool:
        """Fill ``record`` with what is stored in ``slot``."""
        started = time.monotonic()
        record[:] = self._slot(slot)
        self.statistics.bytes_read += self.slot_bytes
        self.statistics.read_seconds += time.monotonic() - started
        return True

    def release(self, slot: int) -> None:
        """``slot`` may be written again."""
        self._free.append(slot)

    def close(self) -> None:
        """Give the memory back. Idempotent."""
        self._free.clear()
        self._arena.close()

    def _slot(self, slot: int) -> memoryview:
        return self._arena.view[slot * self.slot_bytes : (slot + 1) * self.slot_bytes]
