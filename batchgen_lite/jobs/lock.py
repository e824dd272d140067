"""One run per output: an advisory lock whose file also tells ``status`` how the run is doing.

``flock`` is released by the kernel when its process dies, however it dies, so a lock can never be stale; the file's
presence means nothing, only the lock does.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from batchgen_lite.errors import StorageError, UsageError


class JobLock:
    """Exclusive hold on a job's files, from construction until ``release`` (or the process's end)."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = _acquire(path)
        self._info: dict[str, Any] = {"pid": os.getpid(), "host": socket.gethostname(), "started": time.time()}
        self.publish({})

    def publish(self, progress: Mapping[str, Any]) -> None:
        """Replace the live status. Small and best effort: a full disk must not end the run here."""
        text = json.dumps({**self._info, "updated": time.time(), "progress": dict(progress)}).encode()
        with contextlib.suppress(OSError):
            os.pwrite(self._fd, text, 0)
            os.ftruncate(self._fd, len(text))

    def release(self) -> None:
        """Give the job up; idempotent. Unlinked while still held, so that nobody locks a file about to vanish."""
        if self._fd >= 0:
            self.path.unlink(missing_ok=True)
            os.close(self._fd)
            self._fd = -1


def _acquire(path: Path) -> int:
    while True:
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise StorageError(f"cannot create the lock {path}: {error.strerror}") from error
        try:
            _lock_exclusively(fd)
        except OSError as error:
            os.close(fd)
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise StorageError(
                    f"cannot lock {path}: {error.strerror}; choose an --output on a file system that supports locks"
                ) from error
            raise UsageError(_held_message(path)) from None
        # The holder before us may have unlinked the file between our open and our lock.
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(fd), os.stat(path)):
                return fd
        os.close(fd)


def _lock_exclusively(fd: int) -> None:
    for _ in range(5):
        try:
            return fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno != errno.EWOULDBLOCK:
                raise
            time.sleep(0.02)  # ``status`` holds a shared lock for microseconds
    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _held_message(path: Path) -> str:
    output = path.name.removesuffix(".lock")
    info = read_status(path) or {}
    holder = f"process {info['pid']} on {info['host']}" if "pid" in info and "host" in info else "another process"
    return f"{holder} is already writing {output}; wait for it, stop it, or choose another --output"


def read_status(path: Path) -> dict[str, Any] | None:
    """What the lock file says, or None if there is none or it is being rewritten right now."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def is_held(path: Path) -> bool:
    """True while a run holds the lock. Takes it shared for an instant; a run that starts just then tries again."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(fd)
    return False
