"""Arenas: aligned, lazily touched, shared by view and tensor, and given back when asked."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest
import torch

from batchgen_lite.errors import BudgetError
from batchgen_lite.offload.arena import HUGE_PAGE, PAGE, Arena

MIB = 1 << 20


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def test_view_and_tensor_share_aligned_zeroed_memory() -> None:
    with Arena(10_000) as arena:
        assert arena.address % PAGE == 0
        assert len(arena.view) == arena.tensor.numel() == arena.nbytes == 10_000
        assert not arena.tensor.any()
        arena.view[9_990:] = bytes(range(10))
        assert arena.tensor[9_990:].tolist() == list(range(10))
        arena.tensor[0] = 7
        assert arena.view[0] == 7


@pytest.mark.parametrize("huge_pages", [False, True])
def test_memory_counts_only_while_it_is_touched(huge_pages: bool) -> None:
    before = resident_bytes()
    with Arena(64 * MIB, huge_pages=huge_pages) as arena:
        assert resident_bytes() - before < 8 * MIB
        arena.tensor.fill_(1)
        full = resident_bytes()
        assert full - before > 60 * MIB
        arena.release(16 * MIB, 48 * MIB)
        assert full - resident_bytes() > 28 * MIB
        assert arena.view[16 * MIB - 1] == 1
        assert arena.view[48 * MIB] == 1
        assert not arena.tensor[16 * MIB : 48 * MIB].any()
    assert resident_bytes() - before < 8 * MIB


def flags_of(address: int) -> set[str]:
    """The kernel's flags of the mapping at ``address``: "hg" asks for huge pages, "nh" refuses them."""
    inside, flags = False, set[str]()
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split()[0]
        if "-" in first and not first.endswith(":"):
            start, stop = (int(end, 16) for end in first.split("-"))
            inside = start <= address < stop
        elif inside and first == "VmFlags:":
            flags |= set(line.split()[1:])
    return flags


@pytest.mark.parametrize("nbytes", [2 * MIB, 2 * MIB + 1, 7 * MIB + 10])
def test_huge_pages_only_where_a_whole_one_lies_inside(nbytes: int) -> None:
    """Where they are on for everything, half a one at the end would touch memory behind the arena."""
    built_in = Path("/sys/kernel/mm/transparent_hugepage").exists()
    with Arena(nbytes) as arena:
        assert arena.address % HUGE_PAGE == 0
        whole = arena.nbytes // HUGE_PAGE * HUGE_PAGE
        for at in range(0, whole, HUGE_PAGE):
            assert ("hg" in flags_of(arena.address + at)) == built_in
        assert "hg" not in flags_of(arena.address + whole)
        assert ("nh" in flags_of(arena.address + whole)) == built_in
        arena.view[nbytes - 1] = 9
        assert arena.tensor[nbytes - 1] == 9
        assert arena.tensor.data_ptr() == arena.address
    for small in (Arena(2 * MIB - 1), Arena(nbytes, huge_pages=False)):
        with small as arena:
            assert "hg" not in flags_of(arena.address)


def test_release_keeps_pages_that_are_only_partly_inside() -> None:
    with Arena(4 * PAGE + 10) as arena:
        arena.tensor.fill_(1)
        assert arena.releasable(PAGE - 1, 3 * PAGE - 1) == PAGE
        assert arena.releasable(5, 6) == 0
        arena.release(PAGE - 1, 3 * PAGE - 1)
        assert arena.tensor.tolist() == [1] * PAGE + [0] * PAGE + [1] * (2 * PAGE + 10)
        arena.release(4 * PAGE, arena.nbytes)
        assert not arena.tensor[4 * PAGE :].any()
        arena.release(5, 6)
        assert arena.view[5] == 1


def test_close_frees_memory_even_where_a_tensor_is_still_held() -> None:
    before = resident_bytes()
    arena = Arena(32 * MIB)
    held: torch.Tensor = arena.tensor.fill_(1)
    arena.close()
    arena.close()
    assert resident_bytes() - before < 8 * MIB
    assert not held[:PAGE].any()


def test_errors_say_what_is_wrong() -> None:
    with pytest.raises(ValueError, match="at least one byte"):
        Arena(0)
    with Arena(100) as arena, pytest.raises(ValueError, match=r"\[0, 101\) is outside the arena of 100 bytes"):
        arena.release(0, 101)
    with pytest.raises(BudgetError, match="refuses 1099511627776 MiB"):
        Arena(1 << 60)
