"""The file that KV of paused sequences is spilled to: records of one size, written and read around the page cache.

Each run has a file of its own in the spill directory, readable by its owner only, locked as long as the run lives and
removed at its end. A run that was killed leaves its file behind, but not its lock, which the kernel takes back: whoever
opens the directory next removes files that nobody holds. So several runs can share a directory.

Nothing here raises for a disk that is full or broken. A spill file is a convenience: the caller computes again instead.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from batchgen_lite.errors import StorageError, UsageError
from batchgen_lite.offload.budget import parse_size
from batchgen_lite.offload.readers.alignment import DEFAULT_ALIGNMENT, direct_alignment

PREFIX, SUFFIX = "batchgen-lite-", ".spill"
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_REFUSED = (errno.EINVAL, errno.EOPNOTSUPP)  # how file systems without O_DIRECT answer


def _pwrite(fd: int, data: memoryview, offset: int) -> int:
    return os.pwrite(fd, data, offset)


def _preadv(fd: int, target: memoryview, offset: int) -> int:
    return os.preadv(fd, [target], offset)


@dataclass(frozen=True, slots=True)
class SpillCalls:
    """The calls that can fail on a real disk; tests pass others to inject faults."""

    open: Callable[[Path, int, int], int] = os.open
    pwrite: Callable[[int, memoryview, int], int] = _pwrite
    pread: Callable[[int, memoryview, int], int] = _preadv


@dataclass(frozen=True, slots=True)
class SpillOptions:
    """What the user grants: a ``directory``; ``disk``: bytes that the file may grow to, None = half of what is free
    there; ``write_limit``: bytes that may be written in all, None = no limit."""

    directory: Path
    disk: int | None = None
    write_limit: int | None = None


def spill_options(
    directory: str | Path | None, disk: int | str | None, write_limit: int | str | None
) -> SpillOptions | None:
    """What --spill-dir, --disk and --spill-write-limit say; sizes in bytes or as users write them. None: no spilling.
    Raises UsageError."""
    sizes = [
        parse_size(size, option) if isinstance(size, str) else size
        for option, size in (("--disk", disk), ("--spill-write-limit", write_limit))
    ]
    if directory is not None:
        return SpillOptions(Path(directory), *sizes)
    for option, size in zip(("--disk", "--spill-write-limit"), sizes, strict=True):
        if size is not None:
            raise UsageError(f"{option} limits the spill file, but there is none; give --spill-dir, too")
    return None


def open_spill_file(options: SpillOptions, record_bytes: int) -> SpillFile:
    """A run's spill file. Raises StorageError if the directory cannot be used."""
    file = SpillFile(options.directory, record_bytes, limit=options.disk, write_limit=options.write_limit)
    if options.disk is None:
        space = os.statvfs(options.directory)
        file.set_limit(space.f_bavail * space.f_frsize // 2)
    return file


@dataclass(slots=True)
class SpillStatistics:
    """``holds``: sequences that were stored; ``problems``: what went wrong, each reason with how often."""

    holds: int = 0
    bytes_written: int = 0
    bytes_read: int = 0
    write_seconds: float = 0.0
    read_seconds: float = 0.0
    largest_bytes: int = 0  # of the file
    problems: dict[str, int] = field(default_factory=dict)

    def problem(self, reason: str) -> None:
        self.problems[reason] = self.problems.get(reason, 0) + 1


class SpillFile:
    """Slots of ``record_bytes``, rounded up to the alignment of direct IO, in a new file in ``directory``.

    ``limit``: bytes that the file may grow to; ``write_limit``: bytes that may be written in all, against wear; None =
    no limit. Not thread-safe. Raises StorageError if the directory cannot be used.
    """

    def __init__(
        self,
        directory: Path,
        record_bytes: int,
        *,
        limit: int | None = None,
        write_limit: int | None = None,
        calls: SpillCalls | None = None,
    ) -> None:
        self._calls = calls or SpillCalls()
        self.statistics = SpillStatistics()
        try:
            directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            self.removed = remove_abandoned(directory)
            self.path, self._fd, self.direct = self._create(directory)
        except OSError as error:
            raise StorageError(
                f"cannot use the spill directory {directory}: {error.strerror}; "
                "choose another --spill-dir, or leave it out: KV is then computed again"
            ) from error
        alignment = max(DEFAULT_ALIGNMENT, direct_alignment(self.path) or 0)
        self.slot_bytes = -(-record_bytes // alignment) * alignment
        self._capacity = 1 << 40
        if limit is not None:
            self.set_limit(limit)
        self._write_limit = write_limit
        self._made = 0
        self._free: list[int] = []

    def set_limit(self, limit: int) -> None:
        """The file may grow to ``limit`` bytes."""
        self._capacity = limit // self.slot_bytes

    @property
    def limit(self) -> int:
        """Bytes that the file may grow to."""
        return self._capacity * self.slot_bytes

    def _create(self, directory: Path) -> tuple[Path, int, bool]:
        """A new, locked file. Another run's clean-up may come between creation and lock: then once more."""
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        while True:
            path, direct = directory / f"{PREFIX}{os.getpid()}-{secrets.token_hex(4)}{SUFFIX}", True
            try:
                fd = self._calls.open(path, flags | os.O_DIRECT, 0o600)
            except OSError as error:
                if error.errno not in _REFUSED:
                    raise
                path.unlink(missing_ok=True)  # some file systems create it and refuse then
                fd, direct = self._calls.open(path, flags, 0o600), False
            if _lock(fd) and _is_at(fd, path):
                return path, fd, direct
            os.close(fd)

    @property
    def free(self) -> int:
        """Records that may still be written at present."""
        free = len(self._free) + self._capacity - self._made
        if self._write_limit is not None:
            free = min(free, (self._write_limit - self.statistics.bytes_written) // self.slot_bytes)
        return max(0, free)

    def write(self, record: memoryview) -> int | None:
        """Store ``record`` (``slot_bytes``, page-aligned) and return its slot; None if it cannot be stored, and the
        statistics say why. A disk that is full is not asked to hold more than it did; a broken one nothing more."""
        if self.free < 1:
            self.statistics.problem("the limits of the spill file were reached")
            return None
        fresh = not self._free
        slot = self._made if fresh else self._free.pop()
        started = time.monotonic()
        try:
            self._write_all(record, slot * self.slot_bytes)
        except OSError as error:
            self._refused(error, slot, fresh)
            return None
        self.statistics.write_seconds += time.monotonic() - started
        self.statistics.bytes_written += self.slot_bytes
        if fresh:
            self._made += 1
            self.statistics.largest_bytes = self._made * self.slot_bytes
        return slot

    def _refused(self, error: OSError, slot: int, fresh: bool) -> None:
        self.statistics.problem(error.strerror or str(error))
        if error.errno in _FULL and fresh:
            self._capacity = self._made
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, self._made * self.slot_bytes)  # what was written of it is room for others
        else:
            self._capacity = self._made = 0
            self._free.clear()

    def read(self, slot: int, record: memoryview) -> bool:
        """Fill ``record`` with what is stored in ``slot``; False if that cannot be read, and the statistics say why."""
        started = time.monotonic()
        try:
            self._read_all(record, slot * self.slot_bytes)
        except OSError as error:
            self.statistics.problem(error.strerror or str(error))
            return False
        self.statistics.read_seconds += time.monotonic() - started
        self.statistics.bytes_read += self.slot_bytes
        return True

    def release(self, slot: int) -> None:
        """``slot`` may be written again."""
        if slot < self._made:
            self._free.append(slot)

    def close(self) -> None:
        """Remove the file. Idempotent."""
        if self._fd < 0:
            return
        self.path.unlink(missing_ok=True)  # while it is locked: nobody takes it for abandoned
        os.close(self._fd)
        self._fd = -1

    def _write_all(self, record: memoryview, offset: int) -> None:
        done = 0
        while done < len(record):
            try:
                written = self._calls.pwrite(self._fd, record[done:], offset + done)
            except OSError as error:
                if not self._fall_back(error):
                    raise
                continue
            if written == 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            done += written
            if self.direct and written % DEFAULT_ALIGNMENT:
                self._buffer()  # the rest does not start where direct IO may
        if not self.direct:
            os.fdatasync(self._fd)  # dirty pages would stay in the cache
            os.posix_fadvise(self._fd, offset, len(record), os.POSIX_FADV_DONTNEED)

    def _read_all(self, record: memoryview, offset: int) -> None:
        done = 0
        while done < len(record):
            try:
                got = self._calls.pread(self._fd, record[done:], offset + done)
            except OSError as error:
                if not self._fall_back(error):
                    raise
                continue
            if got == 0:
                raise OSError(errno.EIO, "the spill file ends too early")
            done += got
            if self.direct and got % DEFAULT_ALIGNMENT:
                self._buffer()
        if not self.direct:
            os.posix_fadvise(self._fd, offset, len(record), os.POSIX_FADV_DONTNEED)

    def _fall_back(self, error: OSError) -> bool:
        """Whether to try again through the page cache: file systems may refuse direct IO only when it comes to it."""
        if error.errno in _REFUSED and self.direct:
            self._buffer()
            return True
        return False

    def _buffer(self) -> None:
        self.direct = False
        fcntl.fcntl(self._fd, fcntl.F_SETFL, fcntl.fcntl(self._fd, fcntl.F_GETFL) & ~os.O_DIRECT)


def remove_abandoned(directory: Path) -> int:
    """Remove spill files in ``directory`` whose run is gone; returns how many. Those of live runs are locked."""
    removed = 0
    for path in directory.glob(f"{PREFIX}*{SUFFIX}"):
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:  # gone meanwhile, or somebody else's
            continue
        try:
            if _lock(fd) and _is_at(fd, path):
                path.unlink(missing_ok=True)
                removed += 1
        finally:
            os.close(fd)
    return removed


def _lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
            raise
        return False
    return True


def _is_at(fd: int, path: Path) -> bool:
    """Whether ``path`` still names the open file."""
    try:
        there = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return os.path.samestat(os.fstat(fd), there)
