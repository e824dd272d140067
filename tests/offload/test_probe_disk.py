"""What kind of disk a path lies on, from a made-up /sys and mount table."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from batchgen_lite.offload import probe_disk
from batchgen_lite.offload.probe_disk import Disk, disk_of


class FakeSys:
    """/sys/block with disks, partitions and mappings; ``number`` is the device number of the tested path."""

    def __init__(self, root: Path, path: Path) -> None:
        self.root = root
        self.number = os.stat(path).st_dev
        (root / "dev" / "block").mkdir(parents=True)
        (root / "block").mkdir()

    def disk(self, name: str, *, rotational: str = "0", model: str = "") -> Path:
        folder = self.root / "block" / name
        (folder / "queue").mkdir(parents=True)
        (folder / "slaves").mkdir()
        (folder / "queue" / "rotational").write_text(f"{rotational}\n")
        if model:
            (folder / "device").mkdir()
            (folder / "device" / "model").write_text(f"{model}   \n")
        return folder

    def partition(self, disk: Path, name: str) -> Path:
        folder = disk / name
        folder.mkdir()
        (folder / "partition").write_text("1\n")
        return folder

    def holds_the_path(self, folder: Path) -> None:
        entry = self.root / "dev" / "block" / f"{os.major(self.number)}:{os.minor(self.number)}"
        entry.symlink_to(folder)


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSys:
    # os.stat(device) of a mount table entry: /dev/null is a device file that is always there.
    monkeypatch.setattr(probe_disk, "filesystem_of", lambda path: ("/dev/null", "ext4", "/data"))
    return FakeSys(tmp_path / "sys", tmp_path)


def test_a_partition_of_an_nvme_disk(fake: FakeSys, tmp_path: Path) -> None:
    fake.holds_the_path(fake.partition(fake.disk("nvme0n1", model="Fast 990"), "nvme0n1p2"))
    assert disk_of(tmp_path, fake.root) == Disk("nvme", "nvme0n1", "Fast 990", "ext4", "/data")


@pytest.mark.parametrize(
    ("name", "rotational", "kind"),
    [("sda", "0", "ssd"), ("sdb", "1", "hdd"), ("vda", "1", "virtual"), ("mmcblk0", "?", "unknown")],
)
def test_kinds(fake: FakeSys, tmp_path: Path, name: str, rotational: str, kind: str) -> None:
    fake.holds_the_path(fake.disk(name, rotational=rotational))
    found = disk_of(tmp_path, fake.root)
    assert (found.kind, found.name) == (kind, name)


def test_encryption_on_a_volume_group_on_a_partition(fake: FakeSys, tmp_path: Path) -> None:
    partition = fake.partition(fake.disk("nvme1n1"), "nvme1n1p3")
    volume = fake.disk("dm-1")
    (volume / "slaves" / "nvme1n1p3").symlink_to(partition)
    crypt = fake.disk("dm-0")
    (crypt / "slaves" / "dm-1").symlink_to(volume)
    fake.holds_the_path(crypt)
    assert disk_of(tmp_path, fake.root).name == "nvme1n1"


def test_a_file_system_with_its_own_number_is_found_by_the_mount_table(fake: FakeSys, tmp_path: Path) -> None:
    fake.number = os.stat("/dev/null").st_rdev
    fake.holds_the_path(fake.disk("nvme2n1"))
    assert disk_of(tmp_path, fake.root).name == "nvme2n1"


@pytest.mark.parametrize(
    ("device", "filesystem", "kind"),
    [
        ("server:/export", "nfs4", "network"),
        ("C:\\", "9p", "network"),
        ("tmpfs", "tmpfs", "memory"),
        ("overlay", "overlay", "unknown"),
    ],
)
def test_no_disk_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, filesystem: str, kind: str
) -> None:
    monkeypatch.setattr(probe_disk, "filesystem_of", lambda path: (device, filesystem, "/data"))
    (tmp_path / "sys").mkdir()
    found = disk_of(tmp_path, tmp_path / "sys")
    assert (found.kind, found.name) == (kind, "")


def test_this_machine(tmp_path: Path) -> None:
    found = disk_of(tmp_path)
    assert found.kind in {"nvme", "ssd", "hdd", "virtual", "network", "memory", "unknown"}
    assert tmp_path.is_relative_to(found.mount_point)
