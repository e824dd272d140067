"""What kind of disk a path lies on, from /sys and the mount table; and plain read rates at several depths."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

from batchgen_lite.offload.probe_cache import filesystem_of

_NETWORK = {
    "nfs",
    "nfs4",
    "cifs",
    "smb3",
    "9p",
    "afs",
    "ceph",
    "glusterfs",
    "lustre",
    "fuse.sshfs",
    "drvfs",
    "virtiofs",
}
_MEMORY = {"tmpfs", "ramfs"}


@dataclass(frozen=True, slots=True)
class Disk:
    """``kind``: "nvme", "ssd", "hdd", "virtual", "network", "memory" or "unknown"; ``name`` the block device (""
    where there is none), ``model`` what it calls itself."""

    kind: str
    name: str
    model: str
    filesystem: str
    mount_point: str


def disk_of(path: Path, sys_root: Path = Path("/sys")) -> Disk:
    """The disk that ``path``, which exists, lies on. What cannot be found out is "unknown" or ""."""
    device, filesystem, mount_point = filesystem_of(path)
    if filesystem in _NETWORK:
        return Disk("network", "", device, filesystem, mount_point)
    if filesystem in _MEMORY:
        return Disk("memory", "", "", filesystem, mount_point)
    name = _block_device(path, device, sys_root)
    if not name:
        return Disk("unknown", "", "", filesystem, mount_point)
    block = sys_root / "block" / name
    return Disk(_kind(name, block), name, _text(block / "device" / "model"), filesystem, mount_point)


def _block_device(path: Path, device: str, sys_root: Path) -> str:
    """The whole disk's name, below partitions and mappings (encryption, volume groups)."""
    number = os.stat(path).st_dev
    entry = sys_root / "dev" / "block" / f"{os.major(number)}:{os.minor(number)}"
    if os.major(number) == 0 or not entry.exists():
        # btrfs, overlay and others have a number of their own; the mount table names the device.
        try:
            number = os.stat(device).st_rdev
        except OSError:
            return ""
        entry = sys_root / "dev" / "block" / f"{os.major(number)}:{os.minor(number)}"
    if not entry.exists():
        return ""
    found = entry.resolve()
    if (found / "partition").exists():
        found = found.parent
    with contextlib.suppress(OSError):
        while below := sorted((found / "slaves").iterdir()):
            found = below[0].resolve()
            if (found / "partition").exists():
                found = found.parent
    return found.name


def _kind(name: str, block: Path) -> str:
    if name.startswith("nvme"):
        return "nvme"
    if name.startswith(("vd", "xvd")):  # what these say about rotation is the hypervisor's guess
        return "virtual"
    rotational = _text(block / "queue" / "rotational")
    return {"0": "ssd", "1": "hdd"}.get(rotational, "unknown")


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
