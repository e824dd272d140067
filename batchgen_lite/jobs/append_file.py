"""A file that only grows, one whole piece at a time: a failed write leaves it as it was before."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from batchgen_lite.errors import StorageError


class AppendFile:
    """``size`` counts whole pieces only. Appends come from one thread; ``sync`` may come from another."""

    def __init__(self, path: Path, size: int) -> None:
        """Open or create ``path`` and cut it to ``size`` bytes: what lies behind is a torn piece."""
        self.path = path
        self.size = size
        self._broken: OSError | None = None
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            os.ftruncate(self._fd, size)
        except OSError as error:
            raise _failed(path, error) from error

    def append(self, piece: bytes) -> int:
        """Write ``piece`` at the end and return where it begins. StorageError if it does not fit (disk full, quota,
        I/O error): then nothing of it stays, and the file takes no more, for its reader expects no holes."""
        if self._broken is not None:
            raise _failed(self.path, self._broken)
        start = position = self.size
        view = memoryview(piece)
        try:
            while view:
                written = os.pwrite(self._fd, view, position)
                position += written
                view = view[written:]
        except OSError as error:
            self._broken = error
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, start)
            raise _failed(self.path, error) from error
        self.size = position
        return start

    def read(self, offset: int, length: int) -> bytes:
        """``length`` bytes at ``offset``, or fewer at the end of the file."""
        try:
            return os.pread(self._fd, length, offset)
        except OSError as error:
            raise StorageError(f"cannot read {self.path}: {error.strerror}") from error

    def sync(self) -> None:
        """Bring everything to the disk."""
        try:
            os.fsync(self._fd)
        except OSError as error:
            self._broken = error
            raise _failed(self.path, error) from error

    def replace_with(self, other: AppendFile) -> None:
        """Go on with ``other``'s file, which was renamed to our path. The descriptor's number stays the same, so that
        a ``sync`` in another thread never meets a closed one."""
        os.dup2(other._fd, self._fd, inheritable=False)
        self.size = other.size
        other.close()

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _failed(path: Path, error: OSError) -> StorageError:
    return StorageError(
        f"cannot write {path}: {error.strerror}; finished work is saved: free space or fix the disk, then run the "
        "same command with --resume"
    )
