"""Make glibc's allocator give memory back, so that the resident size follows what is alive.

By default glibc raises its mmap threshold up to 32 MiB as large blocks are freed, and gives each thread an arena of
its own: freed tensors then stay in heaps that never shrink, and the peak is several times the live bytes. Source of
the parameters: mallopt(3).
"""

from __future__ import annotations

import ctypes
import os

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8

MMAP_THRESHOLD = 1 << 20
"""Bytes. Blocks from this size on get a mapping of their own, which free() gives back at once."""
TRIM_THRESHOLD = 8 << 20
"""Bytes. The heap's free top is given back when it exceeds this: more than the temporaries of one operation, which
would otherwise be given back and faulted in again from operation to operation (with 1 MiB, sweeps of 512 tokens took 6
to 8 % longer)."""


def tune_malloc() -> bool:
    """Set the parameters; True if glibc accepted them, False with another C library (they are then not needed or not
    known). Call once, before threads start. What the user set by MALLOC_* variables stays."""
    if not _is_glibc():
        return False
    mallopt = ctypes.CDLL(None).mallopt
    mallopt.argtypes = (ctypes.c_int, ctypes.c_int)
    accepted = True
    for parameter, variable, value in (
        (_M_MMAP_THRESHOLD, "MALLOC_MMAP_THRESHOLD_", MMAP_THRESHOLD),
        (_M_TRIM_THRESHOLD, "MALLOC_TRIM_THRESHOLD_", TRIM_THRESHOLD),
        (_M_ARENA_MAX, "MALLOC_ARENA_MAX", 1),
    ):
        if variable not in os.environ:
            accepted = mallopt(parameter, value) == 1 and accepted
    return accepted


def _is_glibc() -> bool:
    try:
        return (os.confstr("CS_GNU_LIBC_VERSION") or "").startswith("glibc")
    except (ValueError, OSError):
        return False
