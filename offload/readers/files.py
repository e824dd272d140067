"""The files of a reader: descriptors opened once and shared, few at a time, and proof that a file is still the same."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from batchgen_lite.errors import StorageError
from batchgen_lite.offload.checkpoint.tensors import CheckpointFile
from batchgen_lite.offload.readers.alignment import DEFAULT_ALIGNMENT, direct_alignment

MOST_OPEN = 256
REFUSALS = (errno.EINVAL, errno.EOPNOTSUPP)
"""How file systems without O_DIRECT answer, some at open, some only at read."""
_NO_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)


def _preadv(fd: int, target: memoryview, offset: int) -> int:
    return os.preadv(fd, [target], offset)


@dataclass(frozen=True, slots=True)
class SystemCalls:
    """The calls that can fail on a real disk; tests pass others to inject faults."""

    open: Callable[[Path, int], int] = os.open
    pread: Callable[[int, memoryview, int], int] = _preadv
    """(descriptor, target, file offset) -> bytes read; releases the interpreter's lock while it waits."""


@dataclass(slots=True)
class _Descriptor:
    fd: int
    users: int = 0


def identify(path: Path) -> CheckpointFile:
    """What ``path`` is now. Raises StorageError if it cannot be looked at."""
    try:
        status = os.stat(path)
    except OSError as error:
        raise StorageError(f"cannot open {path}: {error.strerror}; is the model directory complete?") from error
    return CheckpointFile(path, status.st_size, status.st_mtime_ns, status.st_ino)


class FileTable:
    """Leases descriptors of numbered files to reader threads. Thread-safe.

    At most ``max_open`` stay open (least recently used ones are closed first), so a checkpoint of more shards than
    the open-file limit works. Every opening, and every ``check``, compares size, modification time and inode with
    what was expected: a checkpoint changed under the run is an error, never silently other weights.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        *,
        expected: Sequence[CheckpointFile] | None,
        direct: bool,
        max_open: int | None,
        calls: SystemCalls,
    ) -> None:
        if expected is not None and len(expected) != len(paths):
            raise ValueError(f"{len(paths)} paths but {len(expected)} expected files")
        self._expected = tuple(expected) if expected is not None else tuple(identify(path) for path in paths)
        self._paths = tuple(paths)
        self._calls = calls
        self._changed = threading.Condition()
        self._open: OrderedDict[tuple[int, bool], _Descriptor] = OrderedDict()
        self._max_open = max_open if max_open is not None else _affordable_descriptors()
        self._alignments = [direct_alignment(path) if direct else None for path in paths]
        self._direct = [direct and alignment != 0 for alignment in self._alignments]
        self.fallback_reason = ""
        if direct and not all(self._direct):
            refused = self._paths[self._direct.index(False)]
            self.fallback_reason = f"the file system of {refused} does not offer O_DIRECT"
        if not hasattr(os, "O_DIRECT"):
            self._direct = [False] * len(paths)
            self.fallback_reason = "this system has no O_DIRECT"

    def __len__(self) -> int:
        return len(self._paths)

    @property
    def alignment(self) -> int:
        """The strictest alignment that any file asks for, at least 4096 bytes."""
        return max((DEFAULT_ALIGNMENT, *(a for a in self._alignments if a)))

    @property
    def buffered_files(self) -> int:
        return self._direct.count(False)

    def path(self, file: int) -> Path:
        return self._paths[file]

    def size(self, file: int) -> int:
        return self._expected[file].size

    def is_direct(self, file: int) -> bool:
        return self._direct[file]

    def file_alignment(self, file: int) -> int:
        """Bytes; what O_DIRECT needs on this file."""
        return self._alignments[file] or DEFAULT_ALIGNMENT

    def set_buffered(self, file: int, reason: str) -> None:
        """From now on this file is read through the page cache."""
        with self._changed:
            self._direct[file] = False
            self.fallback_reason = self.fallback_reason or reason

    @contextmanager
    def lease(self, file: int, *, direct: bool) -> Iterator[int]:
        """A descriptor that stays open until the block ends. Raises StorageError if the file cannot be opened or is
        not the expected one, and OSError (EINVAL) if O_DIRECT is refused at open."""
        key = (file, direct)
        with self._changed:
            while (descriptor := self._open.get(key)) is None:
                self._open_or_wait(key)
            self._open.move_to_end(key)
            descriptor.users += 1
            self._close_idle(self._max_open)
        try:
            yield descriptor.fd
        finally:
            with self._changed:
                descriptor.users -= 1
                self._changed.notify()

    def check(self, file: int, fd: int) -> None:
        """Raise StorageError if the opened file has changed since the checkpoint was indexed."""
        was = self._expected[file]
        now = os.fstat(fd)
        if (now.st_size, now.st_mtime_ns, now.st_ino) == (was.size, was.mtime_ns, was.inode):
            return
        if now.st_size != was.size:
            change = f"it has {now.st_size} bytes instead of {was.size}"
        else:
            change = "it was written to" if now.st_ino == was.inode else "it was replaced by another file"
        raise StorageError(
            f"{self._paths[file]} changed during the run: {change}; "
            f"restore the checkpoint and start again with --resume"
        )

    def close(self) -> None:
        """Close what is open; nothing may be leased any more."""
        with self._changed:
            self._close_idle(0)

    def _open_or_wait(self, key: tuple[int, bool]) -> None:
        """Open the file, or make room for it. Needs the lock."""
        file, direct = key
        path = self._paths[file]
        try:
            fd = self._calls.open(path, os.O_RDONLY | os.O_CLOEXEC | (os.O_DIRECT if direct else 0))
        except OSError as error:
            if direct and error.errno in REFUSALS:
                raise
            if error.errno in _NO_DESCRIPTORS and self._open:
                self._make_room()
                return
            limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            advice = f"; this process may hold {limit} files open, raise that with `ulimit -n`"
            raise StorageError(
                f"cannot open {path}: {error.strerror}{advice if error.errno in _NO_DESCRIPTORS else ''}"
            ) from error
        self._open[key] = _Descriptor(fd)
        try:
            self.check(file, fd)
        except BaseException:
            self._close_descriptor(key)
            raise
        if not direct:
            # Read-ahead would bring pages into the cache that no DONTNEED of ours covers.
            _advise(fd, 0, 0, os.POSIX_FADV_RANDOM)

    def _make_room(self) -> None:
        """The rest of the program took descriptors that were free when the reader was opened: keep fewer from now on.
        Waits for other threads' reads (each holds one descriptor at a time) where all of ours are in use."""
        had = len(self._open)
        self._close_idle(0)
        self._max_open = max(1, len(self._open))
        if len(self._open) == had:
            self._changed.wait()

    def _close_idle(self, keep: int) -> None:
        """Close least recently used descriptors that nobody uses until ``keep`` are left. Needs the lock."""
        if len(self._open) <= keep:
            return
        for key in [key for key, descriptor in self._open.items() if descriptor.users == 0]:
            if len(self._open) <= keep:
                break
            self._close_descriptor(key)

    def _close_descriptor(self, key: tuple[int, bool]) -> None:
        descriptor = self._open.pop(key)
        if not key[1]:
            # Pages shared by two neighbouring reads escape the reads' own advice.
            drop_cache(descriptor.fd, 0, 0)
        os.close(descriptor.fd)


def drop_cache(fd: int, offset: int, nbytes: int) -> None:
    """Tell the kernel to forget the file's cached pages in the range (``nbytes`` 0: to the end)."""
    _advise(fd, offset, nbytes, os.POSIX_FADV_DONTNEED)


def _advise(fd: int, offset: int, nbytes: int, advice: int) -> None:
    # Advice: some network file systems refuse it, and the read is right without.
    with contextlib.suppress(OSError):
        os.posix_fadvise(fd, offset, nbytes, advice)


def _affordable_descriptors() -> int:
    """Half of what the open-file limit leaves, so that the rest of the program can open files, too."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    try:
        used = len(os.listdir("/proc/self/fd"))
    except OSError:
        used = 32
    return max(4, min(MOST_OPEN, (limit - used) // 2))
