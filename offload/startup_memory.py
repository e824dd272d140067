"""Give back the memory that starting up needed and running does not.

Importing torch runs through some 80 MiB of its libraries' code once: registering operators, mostly. It stays mapped and
counts as this process's, though hardly half of it is ever run again. Dropped, what is needed comes back page by page
from the page cache. Under a budget each of these bytes is a byte of weights that every sweep would read.
"""

from __future__ import annotations

import ctypes

import psutil

_MADV_DONTNEED = 4  # of Linux, on all architectures that torch is built for


def drop_library_code() -> None:
    """Unmap the pages of libraries' code; those in use come back. Where the system does not allow it, nothing happens.

    Only mappings of which this process has no pages of its own: such would be lost (relocations, a debugger's
    breakpoints)."""
    try:
        madvise = ctypes.CDLL(None).madvise
        maps = psutil.Process().memory_maps(grouped=False)
    except (AttributeError, OSError, psutil.Error):
        return
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for mapping in maps:
        if mapping.perms == "r-xp" and mapping.path.startswith("/") and not mapping.anonymous and not mapping.swap:
            start, end = (int(address, 16) for address in mapping.addr.split("-"))
            madvise(start, end - start, _MADV_DONTNEED)


def drop_free_heap() -> None:
    """Have the allocator give back what is free, so that what is resident is what is in use. Only glibc can."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except AttributeError:
        return
