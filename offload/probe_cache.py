"""Probe results on disk, one entry per file system and machine. A cache: whatever is wrong with it, it is empty."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from batchgen_lite.offload.probe_result import ProbeResult

VERSION = 3
"""Changes when what is measured changes meaning."""
OLDEST = 30 * 24 * 3600.0
"""Seconds. Disks fill up and drivers are updated; a month later it is worth two seconds to look again."""


def cache_directory() -> Path:
    """``$XDG_CACHE_HOME/batchgen-lite``, by default ``~/.cache/batchgen-lite`` (XDG base directory specification:
    relative paths are to be ignored)."""
    configured = os.environ.get("XDG_CACHE_HOME", "")
    base = Path(configured) if os.path.isabs(configured) else Path.home() / ".cache"
    return base / "batchgen-lite"


def machine_key(path: Path, cores: int) -> str:
    """Names what a measurement depends on: the file system that ``path`` is on (its device, type and options), the
    processor and how many cores may be used, the kernel."""
    facts = [VERSION, cores, platform.machine(), platform.release(), _processor(), *filesystem_of(path)]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]


def filesystem_of(path: Path) -> tuple[str, str, str]:
    """(device, type, mount point) of the file system that holds ``path``; ("", "", "/") where that is not known."""
    real = path.resolve()
    best = ("", "", "/")
    with contextlib.suppress(OSError):
        for partition in psutil.disk_partitions(all=True):
            inside = real.is_relative_to(partition.mountpoint)
            if inside and len(partition.mountpoint) >= len(best[2]):
                best = (partition.device, partition.fstype, partition.mountpoint)
    return best


class ProbeCache:
    """One JSON file per key in ``directory``; written atomically, so parallel runs cannot tear it."""

    def __init__(self, directory: Path | None = None, *, now: Callable[[], float] = time.time) -> None:
        self._directory = directory or cache_directory()
        self._now = now

    def load(self, key: str) -> ProbeResult | None:
        """The entry, unless it is missing, unreadable, damaged, from the future, or older than ``OLDEST``."""
        try:
            result = ProbeResult.from_json(json.loads(self._path(key).read_bytes()))
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return result if 0 <= self._now() - result.taken_at <= OLDEST else None

    def store(self, key: str, result: ProbeResult) -> bool:
        """Keep the entry; False where the directory cannot be written (the next run then measures again)."""
        path = self._path(key)
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=path.name)
        except OSError:
            return False
        try:
            with open(descriptor, "w") as file:
                json.dump(result.to_json(), file)
            os.replace(name, path)
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(name)
            return False
        return True

    def _path(self, key: str) -> Path:
        return self._directory / f"probe-{key}.json"


def _processor() -> str:
    """The model name from /proc/cpuinfo, or what the platform knows."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()
