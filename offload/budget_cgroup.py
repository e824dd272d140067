"""Memory limits that control groups put on this process: version 1 and 2, at every level up to the root.

A limit binds at each level: a process in an unlimited group inside a limited one is limited. What a level still
allows is ``limit - current + reclaimable``; the kernel counts cached file pages as used but drops them when asked.
Sources: the kernel's Documentation/admin-guide/cgroup-v1/memory.rst and cgroup-v2.rst.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path, PurePosixPath

# Version 1 writes the largest page-aligned number for "no limit"; anything of this order means that.
_UNLIMITED = 1 << 60


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """One limit in bytes. ``source`` names it for messages; ``reclaimable`` are cached file pages counted in
    ``used``."""

    source: str
    limit: int
    used: int
    reclaimable: int

    @property
    def available(self) -> int:
        """Bytes that may still be allocated under it; never negative."""
        return max(0, self.limit - max(0, self.used - self.reclaimable))


@dataclass(frozen=True, slots=True)
class _Mount:
    version: int
    point: Path
    root: str


def cgroup_limits(proc: Path = Path("/proc")) -> tuple[MemoryLimit, ...]:
    """The limits on this process, innermost first; empty without control groups or limits. Never raises: files that
    cannot be read (a hardened container) count as absent."""
    limits: list[MemoryLimit] = []
    mounts = _mounts(proc / "self" / "mountinfo")
    for version, path in _memberships(proc / "self" / "cgroup"):
        for mount in mounts:
            if mount.version == version:
                limits += _limits_of(mount, path)
    return tuple(limits)


def _memberships(table: Path) -> list[tuple[int, str]]:
    """(version, path) of this process's memory groups, from lines "4:memory:/path" and "0::/path"."""
    memberships = []
    for line in _lines(table):
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            memberships.append((2, path))
        elif "memory" in controllers.split(","):
            memberships.append((1, path))
    return memberships


def _mounts(table: Path) -> list[_Mount]:
    """Mounted hierarchies. A mountinfo line: id, parent, device, root, mount point, options, optional fields, "-",
    type, source, super options."""
    mounts = []
    for line in _lines(table):
        before, _, after = line.partition(" - ")
        fields, kind = before.split(), after.split()
        if kind[:1] == ["cgroup2"]:
            mounts.append(_Mount(2, Path(_unescaped(fields[4])), _unescaped(fields[3])))
        elif kind[:1] == ["cgroup"] and "memory" in kind[-1].split(","):
            mounts.append(_Mount(1, Path(_unescaped(fields[4])), _unescaped(fields[3])))
    return mounts


def _limits_of(mount: _Mount, path: str) -> list[MemoryLimit]:
    # In a container without a cgroup namespace the path is the host's, and only its part below the mount's root shows.
    group, root = PurePosixPath(path), PurePosixPath(mount.root)
    relative = group.relative_to(root) if group.is_relative_to(root) else PurePosixPath()
    if ".." in relative.parts:
        relative = PurePosixPath()
    here = mount.point / relative
    levels = [here, *(parent for parent in here.parents if parent.is_relative_to(mount.point))]
    read = _version_1 if mount.version == 1 else _version_2
    return [limit for level in levels for limit in read(level)]


def _version_1(level: Path) -> list[MemoryLimit]:
    limit, used = _number(level / "memory.limit_in_bytes"), _number(level / "memory.usage_in_bytes")
    if limit is None or used is None or limit >= _UNLIMITED:
        return []
    # "total_": with the groups below this one, as the usage counts them.
    reclaimable = _statistic(level, "total_inactive_file", "total_active_file")
    return [MemoryLimit(f"cgroup v1 limit of {level}", limit, used, reclaimable)]


def _version_2(level: Path) -> list[MemoryLimit]:
    used = _number(level / "memory.current")
    if used is None:
        return []
    reclaimable = _statistic(level, "inactive_file", "active_file")
    limits = []
    # Above memory.high the kernel slows a process down to a crawl, which for us is as good as a limit.
    for name in ("memory.max", "memory.high"):
        limit = _number(level / name)
        if limit is not None and limit < _UNLIMITED:
            limits.append(MemoryLimit(f"cgroup v2 {name} of {level}", limit, used, reclaimable))
    return limits


def _statistic(level: Path, *names: str) -> int:
    total = 0
    for line in _lines(level / "memory.stat"):
        name, _, value = line.partition(" ")
        if name in names and value.isdigit():
            total += int(value)
    return total


def _number(path: Path) -> int | None:
    lines = _lines(path)
    return int(lines[0]) if lines and lines[0].isdigit() else None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def _unescaped(field: str) -> str:
    return field.replace("\\040", " ").replace("\\011", "\t").replace("\\134", "\\")
