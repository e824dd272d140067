"""Watch a process from outside: its peak memory, what it read, how long it took.

    python bench/watch_rss.py [--json FILE] [--limit 1536MiB] -- command ...

The peak is the kernel's own high-water mark (VmHWM), so nothing between two looks is missed, and of the whole run
only what grows within the last 20 ms. (The rusage of an ended process is no help: it includes its children's peaks
and the memory of the process it was forked from.) Ends with the command's exit code, or 99 where the peak is above
``--limit``.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

import psutil
from sizes import parse_size

QUICK, SLOW = 0.02, 0.2  # seconds between looks, in a process's first seconds and later: looking costs a core some %
FIRST_SECONDS = 5.0
OVER_LIMIT = 99


@dataclass(frozen=True, slots=True)
class Watched:
    """What was seen of a command. ``peak_rss``: of its main process; ``peak_tree``: the largest sum seen over it and
    its descendants; ``read_bytes``: from storage, by the main process; all in bytes. ``cpu_seconds``: user + system."""

    code: int
    wall_seconds: float
    cpu_seconds: float
    peak_rss: int
    peak_tree: int
    read_bytes: int


def status_field(pid: int, name: str) -> int:
    """A field of /proc/PID/status in bytes; 0 where the process is gone or has no memory any more."""
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith(name + ":"):
                return int(line.split()[1]) * 1024
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return 0


def bytes_read(pid: int) -> int:
    try:
        for line in Path(f"/proc/{pid}/io").read_text().splitlines():
            if line.startswith("read_bytes:"):
                return int(line.split()[1])
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return 0
    return 0


def tree_rss(pid: int) -> int:
    try:
        descendants = psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return 0
    return sum(status_field(each, "VmRSS") for each in (pid, *(child.pid for child in descendants)))


def watch(
    command: Sequence[str],
    *,
    timeout: float | None = None,
    on_look: Callable[[float], None] | None = None,
    stdout: int | IO[bytes] | None = None,
    stderr: int | IO[bytes] | None = None,
) -> Watched:
    """Run ``command`` to its end, or kill it after ``timeout`` seconds. ``on_look`` is told the elapsed seconds.

    ``stdout``, ``stderr``: where the command's own go, as for subprocess.Popen."""
    began = time.monotonic()
    process = subprocess.Popen(list(command), stdout=stdout, stderr=stderr)
    peak = tree = read = 0
    try:
        while True:
            peak = max(peak, status_field(process.pid, "VmHWM"))
            tree = max(tree, tree_rss(process.pid))
            read = max(read, bytes_read(process.pid))
            pid, status, usage = os.wait4(process.pid, os.WNOHANG)
            elapsed = time.monotonic() - began
            if pid:
                break
            if timeout is not None and elapsed > timeout:
                process.kill()
            if on_look is not None:
                on_look(elapsed)
            time.sleep(QUICK if elapsed < FIRST_SECONDS else SLOW)
    except BaseException:
        process.kill()
        raise
    process.returncode = os.waitstatus_to_exitcode(status)
    return Watched(
        code=process.returncode,
        wall_seconds=elapsed,
        cpu_seconds=usage.ru_utime + usage.ru_stime,
        peak_rss=peak,
        peak_tree=max(peak, tree),
        read_bytes=read,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Run a command and report its peak memory, seen from outside.")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--limit", type=parse_size, help=f"exit with {OVER_LIMIT} where the peak is above this")
    parser.add_argument("command", nargs="+")
    args = parser.parse_args()
    seen = watch(args.command)
    if args.json is not None:
        args.json.write_text(json.dumps(asdict(seen)) + "\n")
    print(
        f"watch: exit code {seen.code}, {seen.wall_seconds:.1f} s, {seen.cpu_seconds:.1f} s of CPU, "
        f"peak RSS {seen.peak_rss / 2**20:.0f} MiB, read {seen.read_bytes / 1e6:.0f} MB",
        file=sys.stderr,
    )
    if args.limit is not None and seen.peak_rss > args.limit:
        print(f"watch: above the limit of {args.limit / 2**20:.0f} MiB", file=sys.stderr)
        raise SystemExit(OVER_LIMIT)
    raise SystemExit(seen.code if seen.code >= 0 else 128 - seen.code)


if __name__ == "__main__":
    main()
