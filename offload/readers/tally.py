"""The counters behind a reader's statistics. Thread-safe."""

from __future__ import annotations

import threading
import time

from batchgen_lite.offload.readers.protocol import ReaderStatistics


class Tally:
    """Counts what is asked, read and copied, and the time with at least one submission unfinished."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._submissions = self._unfinished = 0
        self._bytes_asked = self._bytes_read = self._reads = self._bounced = 0
        self._busy = self._busy_since = 0.0

    def began(self) -> None:
        """A submission was queued."""
        with self._lock:
            self._submissions += 1
            self._unfinished += 1
            if self._unfinished == 1:
                self._busy_since = time.perf_counter()

    def ended(self, bytes_asked: int) -> None:
        """A submission is done; ``bytes_asked`` is its size, 0 if it failed."""
        with self._lock:
            self._bytes_asked += bytes_asked
            self._unfinished -= 1
            if self._unfinished == 0:
                self._busy += time.perf_counter() - self._busy_since

    def read(self, nbytes: int, reads: int = 1, bounced: int = 0) -> None:
        """``nbytes`` came from the files by ``reads`` calls; ``bounced`` of them were copied once more."""
        with self._lock:
            self._bytes_read += nbytes
            self._reads += reads
            self._bounced += bounced

    def snapshot(self, buffered_files: int, fallback_reason: str) -> ReaderStatistics:
        """The totals so far; a submission in flight counts as busy up to now."""
        with self._lock:
            return ReaderStatistics(
                submissions=self._submissions,
                bytes_asked=self._bytes_asked,
                bytes_read=self._bytes_read,
                reads=self._reads,
                busy_seconds=self._busy + (time.perf_counter() - self._busy_since if self._unfinished else 0.0),
                bounced_bytes=self._bounced,
                buffered_files=buffered_files,
                fallback_reason=fallback_reason,
            )
