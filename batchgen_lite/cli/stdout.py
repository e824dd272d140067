"""Results to standard output while the job runs: in input order, as far as rows are finished without a gap."""

from __future__ import annotations

import sys
from typing import BinaryIO

from batchgen_lite.errors import StorageError
from batchgen_lite.jobs.done_table import DoneRow
from batchgen_lite.jobs.job import Job


class StdoutFeed:
    """Copies records to standard output. A reader that goes away (``| head``) stops the run as a full disk would."""

    def __init__(self, job: Job, *, unordered: bool, stream: BinaryIO | None = None) -> None:
        if job.sink is None:
            raise RuntimeError("Job.prepare comes first")
        self._sink = job.sink
        self._unordered = unordered
        self._stream = stream or sys.stdout.buffer
        self._next = 0
        self._sink.on_record = self._on_record
        if unordered:
            for _, entry in list(self._sink.journal.done.rows()):
                self._write(entry)
        else:
            self._advance()

    def finish(self) -> None:
        """Nothing may stay in a buffer. StorageError if standard output failed on the way."""
        if self._sink.fatal is None:
            try:
                self._stream.flush()
            except OSError as error:
                self._fail(error)
        if self._sink.fatal is not None:
            raise self._sink.fatal

    def _on_record(self, row: int, entry: DoneRow) -> None:
        if self._unordered:
            self._write(entry)
        else:
            self._advance()

    def _advance(self) -> None:
        while (entry := self._sink.journal.done.get(self._next)) is not None and self._sink.fatal is None:
            self._write(entry)
            self._next += 1

    def _write(self, entry: DoneRow) -> None:
        try:
            self._stream.write(self._sink.read(entry))
            self._stream.flush()
        except OSError as error:
            self._fail(error)

    def _fail(self, error: OSError) -> None:
        reason = error.strerror or str(error)
        self._sink.fail(StorageError(f"cannot write to standard output: {reason}; use --output FILE to keep results"))
