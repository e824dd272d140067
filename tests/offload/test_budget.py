"""Sizes, available memory under nested cgroup limits, accounts and the process's own figures."""

from __future__ import annotations

import math
import threading
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchgen_lite.errors import BudgetError, UsageError
from batchgen_lite.offload.budget import (
    GIB,
    MIB,
    AvailableMemory,
    available_memory,
    default_ram_budget,
    format_size,
    parse_size,
)
from batchgen_lite.offload.budget_accounts import Account, MemoryAccounts
from batchgen_lite.offload.budget_cgroup import MemoryLimit, cgroup_limits
from batchgen_lite.offload.budget_process import peak_resident_bytes, reset_peak, resident_bytes

# ---- sizes ----


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("1536MiB", 1536 * MIB),
        ("8GB", 8_000_000_000),
        ("0.5g", GIB // 2),
        (".5G", GIB // 2),
        ("1.5 GiB", 3 * GIB // 2),
        (" 12gi ", 12 * GIB),
        ("64k", 65_536),
        ("64kB", 64_000),
        ("2TiB", 2 << 40),
        ("1073741824", GIB),
        ("100b", 100),
    ],
)
def test_sizes_in_the_usual_units(text: str, nbytes: int) -> None:
    assert parse_size(text, "--ram") == nbytes


@pytest.mark.parametrize("text", ["", "GiB", "8 X", "8GiBs", "-1g", "1e9", "1_000", "8,5g", "nan", "٣g", "1.2.3m"])
def test_what_is_not_a_size_is_explained(text: str) -> None:
    with pytest.raises(UsageError, match=r"^--ram: .* is not a size; write a number and a unit, as in 1536MiB"):
        parse_size(text, "--ram")


@pytest.mark.parametrize(("text", "said"), [("0g", "no memory at all"), ("99999999t", "more than any machine has")])
def test_sizes_without_sense_are_refused(text: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        parse_size(text, "--ram")


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.50 KiB"), (23 * MIB + MIB // 2, "23.5 MiB"), (1024 * GIB - 1, "1.00 TiB")],
)
def test_sizes_for_people(nbytes: int, text: str) -> None:
    assert format_size(nbytes) == text


@given(st.integers(1, 1 << 50))
def test_a_formatted_size_reads_back(nbytes: int) -> None:
    assert math.isclose(parse_size(format_size(nbytes)), nbytes, rel_tol=0.006)


# ---- control groups ----


class FakeProc:
    """A /proc and control group hierarchies in a folder."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.proc = root / "proc"
        (self.proc / "self").mkdir(parents=True)
        self.mounts: list[str] = []
        self.mount(30, "/", root / "tmpfs", "tmpfs tmpfs rw,mode=755")

    def mount(self, number: int, hierarchy_root: str, point: Path, rest: str) -> Path:
        point.mkdir(parents=True, exist_ok=True)
        self.mounts.append(f"{number} 23 0:{number} {hierarchy_root} {point} rw,relatime shared:1 - {rest}")
        (self.proc / "self" / "mountinfo").write_text("\n".join(self.mounts) + "\n")
        return point

    def member_of(self, lines: str) -> None:
        (self.proc / "self" / "cgroup").write_text(lines)


def write_v2(level: Path, *, used: int, file: int = 0, **limits: object) -> None:
    level.mkdir(parents=True, exist_ok=True)
    (level / "memory.current").write_text(f"{used}\n")
    (level / "memory.stat").write_text(f"anon 1\nfile 999\ninactive_file {file // 2}\nactive_file {file - file // 2}\n")
    for name, value in limits.items():
        (level / f"memory.{name}").write_text(f"{value}\n")


def write_v1(level: Path, *, used: int, limit: int, file: int = 0) -> None:
    level.mkdir(parents=True, exist_ok=True)
    (level / "memory.limit_in_bytes").write_text(f"{limit}\n")
    (level / "memory.usage_in_bytes").write_text(f"{used}\n")
    (level / "memory.stat").write_text(f"inactive_file 0\ntotal_inactive_file {file}\ntotal_active_file 5\n")


def test_version_2_limits_of_every_level_count(tmp_path: Path) -> None:
    fake = FakeProc(tmp_path)
    top = fake.mount(41, "/", tmp_path / "cgroup", "cgroup2 cgroup2 rw")
    fake.member_of("0::/user.slice/job\n")
    write_v2(top / "user.slice" / "job", used=500, file=101, max="max", high="max")
    write_v2(top / "user.slice", used=700, file=200, max=1000, high=900)
    assert [(limit.limit, limit.available) for limit in cgroup_limits(fake.proc)] == [(1000, 500), (900, 400)]
    tightest = available_memory(cgroup_limits(fake.proc))
    assert tightest.nbytes == 400
    assert tightest.total == 900
    assert tightest.bound_by == f"cgroup v2 memory.high of {top / 'user.slice'}"


def test_version_1_limits_beside_an_empty_version_2_hierarchy(tmp_path: Path) -> None:
    fake = FakeProc(tmp_path)
    fake.mount(34, "/", tmp_path / "cpu", "cgroup cgroup rw,cpu")
    memory = fake.mount(35, "/", tmp_path / "memory", "cgroup cgroup rw,memory")
    fake.mount(41, "/", tmp_path / "unified", "cgroup2 cgroup2 rw")
    fake.member_of("8:pids:/\n4:memory:/jobs/one\n1:cpu:/elsewhere\n0::/\n")
    write_v1(memory, used=9_999, limit=9_223_372_036_854_771_712)
    write_v1(memory / "jobs", used=5_000, limit=8_000, file=995)
    write_v1(memory / "jobs" / "one", used=2_000, limit=6_000, file=95)
    assert [limit.available for limit in cgroup_limits(fake.proc)] == [4_100, 4_000]


def test_a_container_sees_its_own_group_as_the_root_of_the_mount(tmp_path: Path) -> None:
    fake = FakeProc(tmp_path)
    memory = fake.mount(35, "/docker/abc", tmp_path / "with space", "cgroup cgroup rw,memory")
    fake.mounts[-1] = fake.mounts[-1].replace("with space", "with\\040space")
    (fake.proc / "self" / "mountinfo").write_text("\n".join(fake.mounts))
    write_v1(memory, used=100, limit=400)
    write_v1(memory / "inner", used=50, limit=300)
    fake.member_of("4:memory:/docker/abc/inner\n")
    assert [limit.available for limit in cgroup_limits(fake.proc)] == [255, 305]
    fake.member_of("4:memory:/../../elsewhere\n")  # moved out of the namespace: only the mount itself is visible
    assert [limit.limit for limit in cgroup_limits(fake.proc)] == [400]


def test_no_control_groups_no_limits(tmp_path: Path) -> None:
    assert cgroup_limits(tmp_path) == ()
    fake = FakeProc(tmp_path / "fake")
    fake.mount(41, "/", tmp_path / "cgroup", "cgroup2 cgroup2 rw")
    fake.member_of("0::/gone\n")
    assert cgroup_limits(fake.proc) == ()


def test_an_overdrawn_limit_leaves_nothing_and_never_less() -> None:
    assert MemoryLimit("x", 100, 300, 50).available == 0
    assert MemoryLimit("x", 100, 10, 50).available == 100


def test_this_machine_allows_something_but_not_more_than_it_has() -> None:
    available = available_memory()
    assert 0 < available.nbytes <= available.total <= psutil.virtual_memory().total


@pytest.mark.parametrize(
    ("available", "total", "budget"),
    [
        (1300 * MIB, 1536 * MIB, 1300 * MIB + 200 * MIB - int(153.6 * MIB)),
        (500 * MIB, 600 * MIB, 500 * MIB + 200 * MIB - 128 * MIB),
        (60 * GIB, 64 * GIB, 58 * GIB + 200 * MIB),
        (0, 1536 * MIB, 200 * MIB - int(153.6 * MIB)),
        (0, 64 * GIB, 0),
    ],
)
def test_the_default_budget_leaves_headroom(available: int, total: int, budget: int) -> None:
    assert default_ram_budget(AvailableMemory(available, total, "x"), resident=200 * MIB) == budget


# ---- accounts ----


def test_accounts_add_up_and_remember_their_peaks() -> None:
    accounts = MemoryAccounts(100)
    accounts.reserve("ring", 40)
    accounts.reserve("kv", 30)
    accounts.release("ring", 40)
    with accounts.holding("workspace", 50):
        assert accounts.held == 80
        assert accounts.free == 20
    assert accounts.peak == 80
    assert accounts.accounts() == (Account("ring", 0, 40), Account("kv", 30, 30), Account("workspace", 0, 50))


def test_what_does_not_fit_is_refused_with_figures_and_changes_nothing() -> None:
    accounts = MemoryAccounts(100 * MIB, option="--vram")
    accounts.reserve("ring", 60 * MIB)
    with pytest.raises(BudgetError) as refusal:
        accounts.reserve("kv", 50 * MIB)
    assert str(refusal.value) == (
        "kv needs 50.0 MiB, but of the budget of 100 MiB only 40.0 MiB is left (held: ring 60.0 MiB); "
        "--vram would have to be at least 110 MiB"
    )
    assert accounts.held == accounts.peak == 60 * MIB
    accounts.reserve("kv", 40 * MIB)
    assert accounts.free == 0


def test_books_cannot_be_falsified() -> None:
    accounts = MemoryAccounts(100)
    accounts.reserve("kv", 10)
    with pytest.raises(ValueError, match="cannot release 11 bytes of kv, which holds 10"):
        accounts.release("kv", 11)
    with pytest.raises(ValueError, match="cannot reserve -1 bytes"):
        accounts.reserve("kv", -1)
    with pytest.raises(RuntimeError, match="inside"), accounts.holding("workspace", 90):
        raise RuntimeError("inside")
    assert accounts.held == 10


def test_threads_never_overdraw_together() -> None:
    accounts = MemoryAccounts(1000)
    refused: list[BudgetError] = []

    def draw() -> None:
        for _ in range(300):
            try:
                accounts.reserve("kv", 1)
            except BudgetError as error:
                refused.append(error)

    threads = [threading.Thread(target=draw) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert accounts.held == 1000
    assert len(refused) == 200


# ---- the process ----


def test_the_peak_follows_the_resident_size_and_can_start_again() -> None:
    before = resident_bytes()
    block = bytearray(64 * MIB)
    grown = resident_bytes()
    assert grown - before > 60 * MIB
    assert peak_resident_bytes() >= grown - MIB  # the two counters lag each other by a few pages
    del block
    assert peak_resident_bytes() >= grown - MIB
    if reset_peak():
        assert peak_resident_bytes() < grown - 48 * MIB


def test_without_proc_the_present_size_is_the_answer(tmp_path: Path) -> None:
    assert abs(peak_resident_bytes(tmp_path) - resident_bytes()) < 16 * MIB
    assert not reset_peak(tmp_path)
