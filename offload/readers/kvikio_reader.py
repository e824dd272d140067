"""Reading with RAPIDS kvikio (extra ``gds``): GPUDirect Storage into device memory where card and driver have it,
kvikio's own POSIX threads elsewhere and for host memory.

kvikio's futures cannot be awaited and small reads run inside ``pread``, so two threads stand around its pool: one
issues reads in the order of submission, the other waits for them in the same order and calls back.

Device memory: kvikio reads on streams of its own, which are not ordered against torch's. Before a slot is submitted
again, the caller must have waited (on the host) for the event that says its last user is finished.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from batchgen_lite.errors import StorageError, UsageError
from batchgen_lite.offload.checkpoint.tensors import CheckpointFile
from batchgen_lite.offload.readers.blocks import Run, check_piece, merge
from batchgen_lite.offload.readers.callback import Done, report
from batchgen_lite.offload.readers.files import FileTable, SystemCalls, drop_cache
from batchgen_lite.offload.readers.kvikio_probe import configure, open_cufile, why_unavailable
from batchgen_lite.offload.readers.protocol import ReaderStatistics, ReadPiece
from batchgen_lite.offload.readers.tally import Tally


class DeviceMemory(Protocol):
    """Bytes on a device: a uint8 CUDA tensor, or anything that slices and has ``__cuda_array_interface__``."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: slice, /) -> Any: ...


@dataclass(frozen=True, slots=True)
class DevicePiece:
    """``nbytes`` at ``offset`` of file number ``file`` to ``arena[position:position + nbytes]`` on a device. Aligned as
    a ReadPiece is, the piece goes by DMA; otherwise kvikio copies its ends. Nothing around it is written."""

    file: int
    offset: int
    nbytes: int
    arena: DeviceMemory
    position: int


@dataclass(frozen=True, slots=True)
class _Read:
    """One call of kvikio: ``nbytes`` at ``offset`` into ``target``."""

    file: int
    offset: int
    nbytes: int
    target: Any


class _Submission:
    __slots__ = ("done", "error", "futures", "nbytes", "reads")

    def __init__(self, done: Done, nbytes: int, reads: list[_Read]) -> None:
        self.done = done
        self.nbytes = nbytes
        self.reads = reads
        self.futures: list[tuple[_Read, Any]] = []
        self.error: BaseException | None = None


class KvikioReader:
    """``Reader`` by kvikio; ``submit_to_device`` reads into device memory as well.

    ``threads`` and ``task_bytes`` set kvikio's pool, which is one for the whole process. The files of a run are opened
    at their first read and stay open (two descriptors each); ``expected`` as in DirectReader.

    Raises UsageError, with the reason, where kvikio cannot read here: that is proven by reading from the first file.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        *,
        threads: int = 8,
        task_bytes: int = 1 << 20,
        expected: Sequence[CheckpointFile] | None = None,
    ) -> None:
        if not 1 <= threads <= 256:
            raise UsageError(f"{threads} reader threads; from 1 to 256 are possible")
        if not 4096 <= task_bytes <= 1 << 30:
            raise UsageError(f"kvikio tasks of {task_bytes} bytes; from 4096 to {1 << 30} are possible")
        reason = why_unavailable(paths[0] if paths else None, threads=threads, task_bytes=task_bytes)
        if reason:
            raise UsageError(f"the kvikio reader cannot be used: {reason}; or choose --reader direct")
        configure(threads, task_bytes)
        self.name = "kvikio"
        self._task_bytes = task_bytes
        # The table proves identity and knows alignments; descriptors are kvikio's own.
        self._files = FileTable(paths, expected=expected, direct=True, max_open=None, calls=SystemCalls())
        self.alignment = self._files.alignment
        self._open: dict[int, Any] = {}
        self._tally = Tally()
        self._lock = threading.Lock()
        self._closing = False
        self._to_issue: queue.SimpleQueue[_Submission | None] = queue.SimpleQueue()
        self._to_collect: queue.SimpleQueue[_Submission | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._issue_all, name="kvikio-issue", daemon=True),
            threading.Thread(target=self._collect_all, name="kvikio-collect", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, pieces: Sequence[ReadPiece], done: Done) -> None:
        """See ``Reader.submit``. Raises ValueError for a piece outside its arena or of an unknown file."""
        for piece in pieces:
            check_piece(piece, len(self._files))
        reads = [self._host_read(run) for run in merge(pieces)]
        self._enqueue(_Submission(done, sum(piece.nbytes for piece in pieces), reads))

    def submit_to_device(self, pieces: Sequence[DevicePiece], done: Done) -> None:
        """As ``submit``, into device memory; see the head of this module for what the caller must wait for."""
        for piece in pieces:
            if not 0 <= piece.file < len(self._files) or min(piece.nbytes, piece.offset, piece.position) < 0:
                raise ValueError(f"a piece of an unknown file or with a negative number: {piece}")
            if piece.position + piece.nbytes > len(piece.arena):
                raise ValueError(f"{piece.nbytes} bytes at {piece.position} are outside an arena of {len(piece.arena)}")
        reads = [
            _Read(p.file, p.offset, p.nbytes, p.arena[p.position : p.position + p.nbytes]) for p in pieces if p.nbytes
        ]
        self._enqueue(_Submission(done, sum(piece.nbytes for piece in pieces), reads))

    def statistics(self) -> ReaderStatistics:
        return self._tally.snapshot(self._files.buffered_files, self._files.fallback_reason)

    def close(self) -> None:
        with self._lock:
            if self._closing:
                return
            self._closing = True
            self._to_issue.put(None)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()

    def _enqueue(self, submission: _Submission) -> None:
        if not submission.reads:
            submission.done(None)
            return
        with self._lock:
            if not self._closing:
                self._tally.began()
                self._to_issue.put(submission)
                return
        submission.done(StorageError("the reader is closed"))

    def _host_read(self, run: Run) -> _Read:
        """Widened to whole blocks where the arena has room, so that kvikio reads them directly and in place. The end
        of the file stays where it is: kvikio takes a read beyond it for an error."""
        memory = np.frombuffer(run.arena, np.uint8)
        alignment = self._files.file_alignment(run.file)
        head = run.offset % alignment
        begin, offset = run.position - head, run.offset - head
        length = min(-(-(head + run.nbytes) // alignment) * alignment, self._files.size(run.file) - offset)
        address: int = memory.__array_interface__["data"][0]
        fits = begin >= 0 and begin + length <= len(memory) and length >= head + run.nbytes
        if fits and (address + begin) % alignment == 0:
            return _Read(run.file, offset, length, memory[begin : begin + length])
        return _Read(run.file, run.offset, run.nbytes, memory[run.position : run.position + run.nbytes])

    def _issue_all(self) -> None:
        while (submission := self._to_issue.get()) is not None:
            self._issue(submission)
            self._to_collect.put(submission)
            # No name may keep the caller's arena alive while the thread waits.
            del submission
        self._to_collect.put(None)

    def _collect_all(self) -> None:
        while (submission := self._to_collect.get()) is not None:
            self._collect(submission)
            del submission
        for file in self._open.values():
            drop_cache(file.fileno(), 0, 0)
            file.close()
        self._open.clear()

    def _issue(self, submission: _Submission) -> None:
        if self._closing:
            submission.error = StorageError("the reader was closed before everything queued was read")
            return
        for read in submission.reads:
            try:
                file = self._file(read.file)
                future = file.pread(read.target, read.nbytes, read.offset, self._task_bytes)
            except BaseException as error:  # the thread must live on, and the submission must end
                submission.error = self._failure(read, error)
                return
            submission.futures.append((read, future))

    def _collect(self, submission: _Submission) -> None:
        # All futures are waited for, also after an error: kvikio must not write into memory that was given back.
        for read, future in submission.futures:
            try:
                count = future.get()
                if count != read.nbytes:
                    raise EOFError(f"only {count} bytes came")
                self._after(read)
            except BaseException as error:
                submission.error = submission.error or self._failure(read, error)
            else:
                self._tally.read(count)
        self._tally.ended(submission.nbytes if submission.error is None else 0)
        report(submission.done, submission.error)

    def _after(self, read: _Read) -> None:
        file = self._open[read.file]
        self._files.check(read.file, file.fileno())
        if not self._files.is_direct(read.file):
            drop_cache(file.fileno(), read.offset, read.nbytes)

    def _file(self, number: int) -> Any:
        file = self._open.get(number)
        if file is None:
            file = open_cufile(self._files.path(number))
            self._files.check(number, file.fileno())
            if not file.is_direct_io_supported():
                self._files.set_buffered(number, f"{self._files.path(number)} refuses O_DIRECT")
            self._open[number] = file
        return file

    def _failure(self, read: _Read, error: BaseException) -> BaseException:
        if isinstance(error, StorageError):
            return error
        path = self._files.path(read.file)
        try:
            size = os.stat(path).st_size
        except OSError as gone:
            return StorageError(f"cannot open {path}: {gone.strerror}")
        if size < read.offset + read.nbytes:
            return StorageError(
                f"{path} ends at offset {size}, but {read.nbytes} bytes at offset {read.offset} were wanted; it was "
                f"truncated or copied incompletely: restore it and start again with --resume"
            )
        return StorageError(
            f"kvikio failed to read {read.nbytes} bytes at offset {read.offset} of {path}: {error}; check the disk, "
            f"or try --reader direct, then start again with --resume"
        )
