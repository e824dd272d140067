"""Run a command under limits of memory and disk rate, by control groups; they are gone afterwards.

    python bench/limits.py --memory 1536MiB --read-rate 400MB --disk checkpoint/ -- command ...
    python bench/limits.py --check --disk checkpoint/

Works with cgroup v1 (controllers memory and blkio) and v2 (memory and io) and needs the right to make groups, mostly
root's. Where that is missing ``LimitsUnavailable`` says which step failed. The memory limit counts page cache too, as
it does for a container: a process whose own memory fits may still be slowed, because its cache is reclaimed.

Sources: the kernel's documents cgroup-v1/memory.rst, cgroup-v1/blkio-controller.rst and cgroup-v2.rst.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from sizes import parse_size

# Moves itself into the groups, then becomes the command: nothing of it runs outside the limits.
ENTER = 'while [ "$1" != -- ]; do echo $$ > "$1" || exit 125; shift; done; shift; exec "$@"'
EMPTY_WITHIN_SECONDS = 10.0


class LimitsUnavailable(RuntimeError):
    """This machine or this user cannot set the limit; the message says why."""


@dataclass(frozen=True, slots=True)
class Controller:
    """Where groups of one controller are made: below ``parent``. ``version`` is 1 or 2."""

    version: int
    parent: Path


@dataclass
class LimitedGroup:
    """The groups that make up one set of limits. Empty where no limit was asked for."""

    folders: list[Path] = field(default_factory=list)

    def command(self, command: Sequence[str]) -> list[str]:
        """``command`` as it must be started to run inside the limits."""
        if not self.folders:
            return list(command)
        entries = [str(folder / "cgroup.procs") for folder in self.folders]
        return ["sh", "-c", ENTER, "limits", *entries, "--", *command]

    def peak_bytes(self) -> int | None:
        """The most memory that the group has held, page cache included; None without a memory limit."""
        for folder in self.folders:
            for name in ("memory.max_usage_in_bytes", "memory.peak"):
                if (folder / name).exists():
                    return int((folder / name).read_text())
        return None

    def killed_for_memory(self) -> int:
        """How many processes the kernel ended because the group was full."""
        total = 0
        for folder in self.folders:
            for name in ("memory.oom_control", "memory.events"):
                if (folder / name).exists():
                    fields = dict(line.split() for line in (folder / name).read_text().splitlines())
                    total += int(fields.get("oom_kill", 0))
        return total


def find_controller(version1: str, version2: str, mounts: Path = Path("/proc/self/mountinfo")) -> Controller:
    """Where the controller (its names in v1 and v2) is mounted; v1 is preferred where it holds the controller."""
    unified: Path | None = None
    for line in mounts.read_text().splitlines():
        before, _, after = line.partition(" - ")
        point, (kind, _, options) = Path(before.split()[4]), after.split()[:3]
        if kind == "cgroup" and version1 in options.split(","):
            return Controller(1, point)
        if kind == "cgroup2" and version2 in (point / "cgroup.controllers").read_text().split():
            unified = point
    if unified is None:
        raise LimitsUnavailable(f'no cgroup hierarchy offers the controller "{version1}" (v1) or "{version2}" (v2)')
    return Controller(2, unified)


def whole_disk(path: Path, devices: Path = Path("/sys/dev/block")) -> str:
    """ "MAJOR:MINOR" of the disk that holds ``path``; the disk of a partition, since only disks can be throttled."""
    number = path.stat().st_dev
    entry = devices / f"{os.major(number)}:{os.minor(number)}"
    if not entry.exists():
        raise LimitsUnavailable(
            f"{path} lies on no block device of its own (device {entry.name}: an overlay, tmpfs, btrfs or network "
            "file system), so its read rate cannot be limited"
        )
    here = entry.resolve()
    return (here.parent if (here / "partition").exists() else here).joinpath("dev").read_text().strip()


def write_setting(file: Path, value: str) -> None:
    try:
        file.write_text(value)
    except OSError as error:
        raise LimitsUnavailable(f'cannot write "{value}" to {file}: {error.strerror}') from error


@contextmanager
def group_of(controller: Controller, name: str, switch: str) -> Iterator[Path]:
    """A new group, removed at the end with whatever still runs in it. ``switch``: the controller's name in v2."""
    if controller.version == 2:
        # The kernel wants the controller switched on in the parent before a child can use it.
        write_setting(controller.parent / "cgroup.subtree_control", f"+{switch}")
    folder = controller.parent / name
    try:
        folder.mkdir()
    except OSError as error:
        raise LimitsUnavailable(f"cannot make the control group {folder}: {error.strerror}") from error
    try:
        yield folder
    finally:
        remove_group(folder)


def read_processes(folder: Path) -> list[int]:
    return [int(pid) for pid in (folder / "cgroup.procs").read_text().split()]


def remove_group(folder: Path) -> None:
    """End what is left in the group, then remove it. Processes leave a group some time after they were killed."""
    deadline = time.monotonic() + EMPTY_WITHIN_SECONDS
    while True:
        for pid in read_processes(folder):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        try:
            folder.rmdir()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise LimitsUnavailable(f"cannot remove the control group {folder}: {error.strerror}") from error
        time.sleep(0.05)


def limit_memory(stack: ExitStack, name: str, size: int) -> Path:
    controller = find_controller("memory", "memory")
    folder = stack.enter_context(group_of(controller, name, "memory"))
    write_setting(folder / ("memory.limit_in_bytes" if controller.version == 1 else "memory.max"), str(size))
    # No swapping out of trouble: memory and swap together get the same ceiling. Absent where there is no accounting.
    together = folder / ("memory.memsw.limit_in_bytes" if controller.version == 1 else "memory.swap.max")
    if together.exists():
        write_setting(together, str(size) if controller.version == 1 else "0")
    return folder


def limit_reads(stack: ExitStack, name: str, rate: int, path: Path) -> Path:
    disk = whole_disk(path)
    controller = find_controller("blkio", "io")
    folder = stack.enter_context(group_of(controller, name, "io"))
    if controller.version == 1:
        write_setting(folder / "blkio.throttle.read_bps_device", f"{disk} {rate}")
    else:
        write_setting(folder / "io.max", f"{disk} rbps={rate}")
    return folder


@contextmanager
def limited(
    memory: int | None = None, read_rate: int | None = None, path: Path | None = None
) -> Iterator[LimitedGroup]:
    """Groups with a ceiling on memory (bytes) and on reads (bytes/s) from the disk that holds ``path``."""
    if read_rate is not None and path is None:
        raise ValueError("a read rate needs the path of a file or folder on the disk to be limited")
    name = f"batchgen-bench-{os.getpid()}-{time.monotonic_ns()}"
    with ExitStack() as stack:
        group = LimitedGroup()
        if memory is not None:
            group.folders.append(limit_memory(stack, name, memory))
        if read_rate is not None and path is not None:
            group.folders.append(limit_reads(stack, name, read_rate, path))
        yield group


def why_unavailable(memory: bool = False, disk: Path | None = None) -> str | None:
    """None where these limits can be set here, else the reason."""
    try:
        with limited(1 << 30 if memory else None, None if disk is None else 1 << 30, disk):
            return None
    except LimitsUnavailable as error:
        return str(error)


def end_on_sigterm() -> None:
    """Let SIGTERM end this process as an exception does, so that groups and children are tidied up."""

    def leave(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, leave)


def main() -> None:
    end_on_sigterm()
    parser = argparse.ArgumentParser(description="Run a command under limits of memory and disk rate.")
    parser.add_argument("--memory", type=parse_size, help="ceiling, page cache included, such as 1536MiB")
    parser.add_argument("--read-rate", type=parse_size, help="bytes a second, such as 400MB")
    parser.add_argument("--disk", type=Path, default=Path(), help="a path on the disk to be limited (default .)")
    parser.add_argument("--check", action="store_true", help="only say whether limits can be set here")
    parser.add_argument("command", nargs="*")
    args = parser.parse_args()
    if args.check:
        print(f"memory: {why_unavailable(memory=True) or 'can be limited'}")
        print(f"disk reads: {why_unavailable(disk=args.disk) or 'can be limited'}")
        return
    if not args.command:
        parser.error("a command is needed, after --")
    try:
        with limited(args.memory, args.read_rate, args.disk) as group:
            code = subprocess.run(group.command(args.command), check=False).returncode
            peak, killed = group.peak_bytes(), group.killed_for_memory()
    except LimitsUnavailable as error:
        raise SystemExit(f"limits: {error}") from error
    if peak is not None:
        print(f"limits: peak {peak / 2**20:.0f} MiB with page cache, {killed} killed for memory", file=sys.stderr)
    raise SystemExit(code if code >= 0 else 128 - code)


if __name__ == "__main__":
    main()
