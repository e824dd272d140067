"""glibc gives freed tensors back once it is tuned; without, it keeps them: shown in fresh processes."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

from batchgen_lite.offload import malloc_tuning

_PROGRAM = """
import ctypes, sys
from batchgen_lite.offload.budget_process import resident_bytes
from batchgen_lite.offload.malloc_tuning import tune_malloc

if sys.argv[1] == "tuned":
    assert tune_malloc()
malloc, free = ctypes.CDLL(None).malloc, ctypes.CDLL(None).free
malloc.restype, malloc.argtypes, free.argtypes = ctypes.c_void_p, (ctypes.c_size_t,), (ctypes.c_void_p,)
size = 4 << 20
free(malloc(30 << 20))  # glibc's threshold rises to this
before = resident_bytes()
blocks, small = [], []
for _ in range(32):
    blocks.append(malloc(size))
    ctypes.memset(blocks[-1], 1, size)
    small.append(malloc(64_000))  # survivors above each block: the heap cannot shrink below them
    ctypes.memset(small[-1], 1, 64_000)
for block in blocks:
    free(block)
print((resident_bytes() - before) >> 20)
"""


def kept_mib(how: str) -> int:
    """MiB still resident after 128 MiB of blocks were freed."""
    result = subprocess.run(
        [sys.executable, "-c", _PROGRAM, how], capture_output=True, text=True, timeout=300, check=True
    )
    return int(result.stdout)


def test_freed_blocks_leave_the_resident_size() -> None:
    if platform.libc_ver()[0] != "glibc":
        assert not malloc_tuning.tune_malloc()
        return
    assert kept_mib("plain") > 100, "glibc changed: is the tuning still needed?"
    assert kept_mib("tuned") < 8


def test_another_c_library_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "confstr", lambda name: None)
    assert not malloc_tuning.tune_malloc()
