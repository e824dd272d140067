"""Where a job's results go: OUT.partial and the journal, written as rows move, synced every few seconds."""

from __future__ import annotations

import asyncio
import threading
import zlib
from collections.abc import Callable

from batchgen_lite.errors import StorageError
from batchgen_lite.jobs.append_file import AppendFile
from batchgen_lite.jobs.done_table import DoneRow, Status
from batchgen_lite.jobs.journal import Journal
from batchgen_lite.jobs.layout import JobPaths
from batchgen_lite.runtime.interface import SampledToken

SYNC_SECONDS = 5.0
"""A power loss costs at most this much finished work; a kill costs none of it."""


class ResultSink:
    """Open for one run. All methods belong to one thread, the event loop's; a second thread only syncs.

    A write that fails (disk full) is no row's fault: it is kept in ``fatal``, nothing is written any more, and
    ``on_fatal`` is called, once, from whichever thread met it, to stop the run."""

    def __init__(self, paths: JobPaths, *, sync_seconds: float = SYNC_SECONDS) -> None:
        self.fatal: StorageError | None = None
        self.on_fatal: Callable[[], object] = lambda: None
        self.on_record: Callable[[int, DoneRow], object] = lambda row, entry: None
        end = 0
        size = paths.partial.stat().st_size if paths.partial.exists() else 0
        self._partial = AppendFile(paths.partial, size)

        def holds(entry: DoneRow) -> bool:
            nonlocal end
            line = self._partial.read(entry.offset, entry.length)
            sound = len(line) == entry.length and zlib.crc32(line) == entry.crc
            end = max(end, entry.offset + entry.length) if sound else end
            return sound

        self.journal = Journal(paths.journal, holds)
        self._partial.close()
        self._partial = AppendFile(paths.partial, end)  # cut behind the last record that counts
        self._flush_planned = False
        self._stop_syncing = threading.Event()
        self._sync_seconds = sync_seconds
        self._syncer = threading.Thread(target=self._sync_now_and_then, name="job-sync", daemon=True)
        self._syncer.start()

    def token(self, row: int, sampled: SampledToken, *, scored: bool) -> None:
        """Journal one token; in the kernel's hands once the loop has run its current callbacks (one sweep's)."""
        if self.fatal is None:
            self.journal.token(row, sampled, scored=scored)
            self._plan_flush()

    def record(self, row: int, line: bytes, status: Status) -> None:
        """The row is finished: its line goes to OUT.partial at once."""
        if self.fatal is not None:
            return
        try:
            offset = self._partial.append(line)
        except StorageError as error:
            self.fail(error)
            return
        entry = DoneRow(offset, len(line), zlib.crc32(line), status)
        self.journal.finished(row, entry)
        self._plan_flush()
        self.on_record(row, entry)

    def forget(self, row: int) -> None:
        """The row's record does not count any more; it is to be generated again."""
        self.journal.forget(row)

    def read(self, entry: DoneRow) -> bytes:
        """A record's line. StorageError if it is not what was written."""
        line = self._partial.read(entry.offset, entry.length)
        if zlib.crc32(line) != entry.crc:
            raise StorageError(
                f"{self._partial.path} was changed by someone else at byte {entry.offset}; run with --resume to "
                "generate what was lost again"
            )
        return line

    def fail(self, error: StorageError) -> None:
        """The run cannot go on."""
        if self.fatal is None:
            self.fatal = error
            self.on_fatal()

    def flush(self) -> None:
        self._flush_planned = False
        if self.fatal is None:
            try:
                self.journal.flush()
            except StorageError as error:
                self.fail(error)

    def close(self) -> None:
        """Flush, sync and close; a failure is left in ``fatal``. Idempotent."""
        if self._stop_syncing.is_set():
            return
        self._stop_syncing.set()
        self._syncer.join()
        self.flush()
        self._sync()
        self._partial.close()
        self.journal.close()

    def _plan_flush(self) -> None:
        if self._flush_planned:
            return
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            self.flush()
        else:
            self._flush_planned = True
            loop.call_soon(self.flush)

    def _sync_now_and_then(self) -> None:
        while not self._stop_syncing.wait(self._sync_seconds):
            self._sync()

    def _sync(self) -> None:
        """Records before the entries that name them: see the journal's essay."""
        if self.fatal is None:
            try:
                self._partial.sync()
                self.journal.sync()
            except StorageError as error:
                self.fail(error)
