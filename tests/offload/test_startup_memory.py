"""Code that only starting up needed leaves the resident size; code and data that are in use stay as they are."""

from __future__ import annotations

import ctypes
import mmap
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from batchgen_lite.offload.startup_memory import drop_library_code

_PROGRAM = """
import torch
from batchgen_lite.offload.budget_process import resident_bytes
from batchgen_lite.offload.startup_memory import drop_library_code

x = torch.randn(64, 64)
before = resident_bytes()
drop_library_code()
released = before - resident_bytes()
assert torch.equal(x @ torch.eye(64), x)  # what is needed comes back
print(released >> 20, (before - resident_bytes()) >> 20)
"""
READ, WRITE, RUN = mmap.PROT_READ, mmap.PROT_WRITE, mmap.PROT_EXEC
PAGE = mmap.PAGESIZE


def test_code_of_starting_up_leaves_the_resident_size() -> None:
    result = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, timeout=300, check=True)
    released, with_what_came_back = map(int, result.stdout.split())
    assert released > 40
    assert with_what_came_back > 20


_HEAP = """
from batchgen_lite.offload.budget_process import resident_bytes
from batchgen_lite.offload.startup_memory import drop_free_heap

blocks = [b"x" * (100_000 + i) for i in range(800)]
blocks = blocks[-1:]  # which lies behind the others, so the heap's top cannot shrink
before = resident_bytes()
drop_free_heap()
print((before - resident_bytes()) >> 20)
"""


def test_what_is_free_in_the_heap_leaves_the_resident_size() -> None:
    heap = {"MALLOC_MMAP_THRESHOLD_": str(1 << 20), "MALLOC_TRIM_THRESHOLD_": str(8 << 20)}
    result = subprocess.run(
        [sys.executable, "-c", _HEAP], capture_output=True, text=True, timeout=300, check=True, env=os.environ | heap
    )
    glibc = hasattr(ctypes.CDLL(None), "malloc_trim")
    assert int(result.stdout) > 60 if glibc else int(result.stdout) == 0


class Mapping:
    """Two pages of ``path``, private to this process; the first one has been written to here before it became code."""

    def __init__(self, path: Path) -> None:
        path.write_bytes(b"f" * 2 * PAGE)
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._libc.mmap.restype = ctypes.c_void_p
        self._libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
        self._libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        self._libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
        descriptor = os.open(path, os.O_RDONLY)
        self.address = self._libc.mmap(None, 2 * PAGE, READ | WRITE, mmap.MAP_PRIVATE, descriptor, 0)
        os.close(descriptor)

    def become_code(self) -> None:
        assert self._libc.mprotect(self.address, 2 * PAGE, READ | RUN) == 0

    def text(self, at: int) -> bytes:
        return ctypes.string_at(self.address + at, 3)

    def close(self) -> None:
        self._libc.munmap(self.address, 2 * PAGE)


def test_pages_that_a_process_has_changed_are_not_lost(tmp_path: Path) -> None:
    """Dropped, they would be read from the file again, as it was before: relocations of code are such."""
    mapping = Mapping(tmp_path / "library")
    try:
        ctypes.memmove(mapping.address, b"own", 3)
        mapping.become_code()
        drop_library_code()
        assert mapping.text(0) == b"own"
        assert mapping.text(PAGE) == b"fff"
    finally:
        mapping.close()


def test_code_that_is_a_files_own_is_read_again_from_it(tmp_path: Path) -> None:
    """The counterpart: of such a mapping the resident pages go, and come back with the file's bytes."""
    mapping = Mapping(tmp_path / "library")
    try:
        assert mapping.text(0) == b"fff"
        mapping.become_code()
        assert resident_bytes_at(mapping.address) > 0
        drop_library_code()
        assert resident_bytes_at(mapping.address) == 0
        assert mapping.text(0) == b"fff"
    finally:
        mapping.close()


def resident_bytes_at(address: int) -> int:
    maps = psutil.Process().memory_maps(grouped=False)
    return next(each.rss for each in maps if int(each.addr.split("-")[0], 16) == address)


def test_a_system_that_tells_nothing_of_its_mappings_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(self: psutil.Process, grouped: bool = True) -> None:
        raise psutil.AccessDenied

    monkeypatch.setattr(psutil.Process, "memory_maps", refused)
    drop_library_code()
