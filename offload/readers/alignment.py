"""What alignment the kernel wants for O_DIRECT on a file: statx(2) with STATX_DIOALIGN, Linux 6.1 and later."""

from __future__ import annotations

import ctypes
import functools
import os
import struct
from collections.abc import Callable
from pathlib import Path

DEFAULT_ALIGNMENT = 4096
"""Bytes. Enough for every disk whose logical blocks are 512 or 4096 bytes; also the page size."""

_AT_FDCWD = -100
_STATX_DIOALIGN = 0x2000
# struct statx (linux/stat.h): stx_mask at 0, stx_dio_mem_align at 0x98, stx_dio_offset_align at 0x9c; 256 bytes.
_STATX_BYTES = 256
_DIO_ALIGN_AT = 0x98


@functools.cache
def _statx() -> Callable[..., int] | None:
    try:
        function = ctypes.CDLL(None, use_errno=True).statx
    except (OSError, AttributeError):  # a C library older than glibc 2.28 or musl 1.2.3
        return None
    function.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_uint, ctypes.c_void_p)
    return function


def direct_alignment(path: Path) -> int | None:
    """The alignment in bytes (of offset, length and address) for O_DIRECT on ``path``; 0 if the kernel says that the
    file does not support it; None if the kernel does not say (older than 6.1, tmpfs, network file systems)."""
    statx = _statx()
    if statx is None:
        return None
    buffer = ctypes.create_string_buffer(_STATX_BYTES)
    if statx(_AT_FDCWD, os.fsencode(path), 0, _STATX_DIOALIGN, buffer) != 0:
        return None
    (mask,) = struct.unpack_from("=I", buffer, 0)
    if not mask & _STATX_DIOALIGN:
        return None
    memory_align, offset_align = struct.unpack_from("=II", buffer, _DIO_ALIGN_AT)
    return 0 if offset_align == 0 else max(memory_align, offset_align)
