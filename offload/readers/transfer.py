"""One block from a file into memory: direct where possible, and whatever a real disk does on the way."""

from __future__ import annotations

import mmap
from dataclasses import dataclass

import numpy as np

from batchgen_lite.errors import StorageError
from batchgen_lite.offload.readers.files import REFUSALS, FileTable, SystemCalls, drop_cache


@dataclass(slots=True)
class Block:
    """``nbytes`` at ``offset`` of ``file`` to ``arena[position:]``; ``address`` is that first byte's address."""

    file: int
    offset: int
    nbytes: int
    arena: memoryview
    position: int
    address: int


@dataclass(slots=True)
class Cost:
    """What one block took: bytes that came from the file, read calls, bytes copied."""

    bytes_read: int = 0
    reads: int = 0
    bounced: int = 0


class Transfer:
    """Reads blocks for one thread. Not thread-safe: it owns the thread's bounce buffer."""

    def __init__(self, files: FileTable, calls: SystemCalls, largest_block: int) -> None:
        self._files = files
        self._calls = calls
        self._bounce_bytes = largest_block + 2 * files.alignment
        self._bounce: memoryview | None = None

    def read(self, block: Block) -> Cost:
        """Bring the block into memory. Raises StorageError, naming file and offset."""
        cost = Cost()
        if self._files.is_direct(block.file):
            try:
                self._read_direct(block, cost)
                return cost
            except OSError as error:
                if error.errno not in REFUSALS:
                    raise self._failure(block, error) from error
                path = self._files.path(block.file)
                self._files.set_buffered(block.file, f"{path} refuses O_DIRECT ({error.strerror})")
        try:
            self._read_buffered(block, cost)
        except OSError as error:
            raise self._failure(block, error) from error
        return cost

    def _read_direct(self, block: Block, cost: Cost) -> None:
        alignment = self._files.file_alignment(block.file)
        head = block.offset % alignment
        wanted = head + block.nbytes
        length = -(-wanted // alignment) * alignment
        begin = block.position - head
        in_place = block.address % alignment == head and begin >= 0 and begin + length <= len(block.arena)
        target = block.arena[begin : begin + length] if in_place else self._bounce_buffer()[:length]
        with self._files.lease(block.file, direct=True) as fd:
            got = self._fill(fd, target, block, block.offset - head, wanted, alignment, cost)
            if got >= wanted:
                self._files.check(block.file, fd)
        if got < wanted:
            self._fill_rest(block, target, block.offset - head, got, wanted, cost)
        if not in_place:
            # numpy copies without the interpreter's lock; a memoryview assignment would hold it.
            source = np.frombuffer(target, np.uint8, block.nbytes, head)
            np.copyto(np.frombuffer(block.arena, np.uint8, block.nbytes, block.position), source)
            cost.bounced += block.nbytes

    def _read_buffered(self, block: Block, cost: Cost) -> None:
        target = block.arena[block.position : block.position + block.nbytes]
        self._fill_rest(block, target, block.offset, 0, block.nbytes, cost)

    def _fill_rest(self, block: Block, target: memoryview, start: int, got: int, wanted: int, cost: Cost) -> None:
        """Fill ``target[got:wanted]`` from file offset ``start + got`` on through the page cache, leaving none of it
        behind."""
        with self._files.lease(block.file, direct=False) as fd:
            self._fill(fd, target[got:wanted], block, start + got, wanted - got, 1, cost)
            self._files.check(block.file, fd)
            # Only whole pages are dropped, so the range is widened to pages.
            first = (start + got) // mmap.PAGESIZE * mmap.PAGESIZE
            last = -(-(start + wanted) // mmap.PAGESIZE) * mmap.PAGESIZE
            drop_cache(fd, first, last - first)

    def _fill(
        self, fd: int, target: memoryview, block: Block, start: int, wanted: int, alignment: int, cost: Cost
    ) -> int:
        """Read until ``wanted`` bytes of ``target`` are there; returns how many are. Fewer only if a short read ended
        between two aligned offsets, where a direct read cannot go on."""
        got = 0
        while got < wanted:
            try:
                count = self._calls.pread(fd, target[got:] if got else target, start + got)
            except InterruptedError:
                continue
            cost.reads += 1
            if count == 0:
                raise self._truncated(block, start + got)
            cost.bytes_read += count
            got += count
            if got % alignment:
                break
        return got

    def _bounce_buffer(self) -> memoryview:
        if self._bounce is None:
            self._bounce = memoryview(mmap.mmap(-1, self._bounce_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
        return self._bounce

    def _truncated(self, block: Block, end: int) -> StorageError:
        path, size = self._files.path(block.file), self._files.size(block.file)
        return StorageError(
            f"{path} ends at offset {end}, but {block.nbytes} bytes at offset {block.offset} were wanted (it had "
            f"{size} bytes when it was opened); it was truncated or copied incompletely: restore it and start again "
            f"with --resume"
        )

    def _failure(self, block: Block, error: OSError) -> StorageError:
        return StorageError(
            f"reading {block.nbytes} bytes at offset {block.offset} of {self._files.path(block.file)} failed: "
            f"{error.strerror or error}; check the disk (dmesg, smartctl), then start again with --resume"
        )
