"""The reader of the primary path: O_DIRECT reads from a small pool of threads, straight into their destination.

A submission's pieces become blocks (merged, then split), all blocks of all submissions stand in one queue, and threads
take them from its head: earlier submissions are served first, and a large tile is shared by all threads. The threads
hold no interpreter lock while they wait for the disk. Nothing that is read stays in the page cache, so memory use is
what the caller's arenas are.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from batchgen_lite.errors import StorageError, UsageError
from batchgen_lite.offload.checkpoint.tensors import CheckpointFile
from batchgen_lite.offload.readers.blocks import Run, check_piece, merge, split
from batchgen_lite.offload.readers.callback import Done, report
from batchgen_lite.offload.readers.files import FileTable, SystemCalls
from batchgen_lite.offload.readers.protocol import ReaderStatistics, ReadPiece
from batchgen_lite.offload.readers.tally import Tally
from batchgen_lite.offload.readers.transfer import Block, Cost, Transfer

LARGEST_BLOCK = 1 << 30
"""Bytes. Linux reads at most 2 GiB - 4 KiB in one call; blocks stay well below."""


class _Submission:
    """Counts a submission's blocks down. Guarded by the reader's lock."""

    __slots__ = ("done", "error", "nbytes", "remaining")

    def __init__(self, done: Done, nbytes: int, remaining: int) -> None:
        self.done = done
        self.nbytes = nbytes
        self.remaining = remaining
        self.error: BaseException | None = None


class DirectReader:
    """``Reader`` for files on a local disk; see the protocol for what a piece must satisfy.

    ``threads`` reads of at most ``block_bytes`` are in flight. ``direct=False`` reads through the page cache and drops
    what was read; the same happens by itself, file by file, where the file system refuses O_DIRECT at open or only at
    read (``statistics().fallback_reason`` says so). ``expected`` are the files as the checkpoint's index saw them
    (default: as they are now); any difference later is a StorageError. ``max_open`` bounds open descriptors (default:
    half of what the open-file limit leaves). ``calls`` lets tests inject faults.

    Raises UsageError for settings out of range and StorageError if a file is missing.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        *,
        threads: int = 4,
        block_bytes: int = 4 << 20,
        direct: bool = True,
        expected: Sequence[CheckpointFile] | None = None,
        max_open: int | None = None,
        calls: SystemCalls | None = None,
    ) -> None:
        if not 1 <= threads <= 256:
            raise UsageError(f"{threads} reader threads; from 1 to 256 are possible")
        if not 1 <= block_bytes <= LARGEST_BLOCK:
            raise UsageError(f"read blocks of {block_bytes} bytes; from 1 byte to {LARGEST_BLOCK} are possible")
        calls = calls or SystemCalls()
        self.name = "direct" if direct else "buffered"
        self._files = FileTable(paths, expected=expected, direct=direct, max_open=max_open, calls=calls)
        self.alignment = self._files.alignment
        self._block_bytes = -(-block_bytes // self.alignment) * self.alignment
        self._queue: queue.SimpleQueue[tuple[_Submission, Block] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._closing = False
        self._tally = Tally()
        self._threads = [
            threading.Thread(target=self._work, args=(calls,), name=f"reader-{number}", daemon=True)
            for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, pieces: Sequence[ReadPiece], done: Done) -> None:
        """See ``Reader.submit``. Raises ValueError for a piece outside its arena or of an unknown file."""
        for piece in pieces:
            check_piece(piece, len(self._files))
        blocks = self._blocks(merge(pieces))
        if not blocks:
            done(None)
            return
        submission = _Submission(done, sum(piece.nbytes for piece in pieces), len(blocks))
        with self._lock:
            if not self._closing:
                self._tally.began()
                # Under the lock: two submissions must not interleave.
                for block in blocks:
                    self._queue.put((submission, block))
                return
        done(StorageError("the reader is closed"))

    def statistics(self) -> ReaderStatistics:
        return self._tally.snapshot(self._files.buffered_files, self._files.fallback_reason)

    def close(self) -> None:
        with self._lock:
            if self._closing:
                return
            self._closing = True
            for _ in self._threads:
                self._queue.put(None)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()
        self._files.close()

    def _blocks(self, runs: Sequence[Run]) -> list[Block]:
        blocks: list[Block] = []
        arena: memoryview | None = None
        base = 0
        for run in runs:
            if run.arena is not arena:
                arena = run.arena
                base = np.frombuffer(arena, np.uint8).__array_interface__["data"][0]
            shift = run.position - run.offset
            for offset, nbytes in split(run.offset, run.nbytes, self._block_bytes, self.alignment):
                blocks.append(Block(run.file, offset, nbytes, arena, offset + shift, base + offset + shift))
        return blocks

    def _work(self, calls: SystemCalls) -> None:
        transfer = Transfer(self._files, calls, self._block_bytes)
        while True:
            # No name may keep the block, and so the caller's arena, alive while the thread waits.
            task = self._queue.get()
            if task is None:
                return
            self._serve(transfer, *task)
            del task

    def _serve(self, transfer: Transfer, submission: _Submission, block: Block) -> None:
        cost, error = Cost(), submission.error
        if self._closing and error is None:
            error = StorageError("the reader was closed before everything queued was read")
        if error is None:
            try:
                cost = transfer.read(block)
            except BaseException as caught:  # the thread must live on, and the submission must end
                error = caught
        self._finish(submission, cost, error)

    def _finish(self, submission: _Submission, cost: Cost, error: BaseException | None) -> None:
        self._tally.read(cost.bytes_read, cost.reads, cost.bounced)
        with self._lock:
            submission.error = submission.error or error
            submission.remaining -= 1
            if submission.remaining:
                return
        self._tally.ended(submission.nbytes if submission.error is None else 0)
        report(submission.done, submission.error)
