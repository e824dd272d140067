"""Can kvikio be used here, and how does it reach the disk? Shown by trying, never by a flag.

kvikio needs the NVIDIA driver's libcuda.so.1 even for host memory, and waits forever in a static initialiser when the
driver does not answer; so the driver is asked first, before kvikio is imported.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import os
from pathlib import Path
from typing import Any

_PROBE_BYTES = 1 << 16
"""More than kvikio's 16 KiB threshold, below which its pool is not used."""

_INSTALL = "install it with: pip install 'batchgen-lite[gds]' (Linux, x86_64 or aarch64)"


def why_unavailable(path: Path | None, *, threads: int = 8, task_bytes: int = 1 << 20) -> str:
    """Why kvikio cannot read here, or "" if it can. ``path`` is a file to prove it with (None: imports only)."""
    if importlib.util.find_spec("kvikio") is None:
        return f"the package kvikio is not installed; {_INSTALL}"
    reason = _driver_problem()
    if reason:
        return reason
    try:
        configure(threads, task_bytes)
        return _probe_read(path) if path is not None else ""
    except Exception as error:
        # Whatever a library of another version raises is a reason not to use it, not one to end the run.
        return f"kvikio does not work here: {type(error).__name__}: {error}"


def configure(threads: int, task_bytes: int) -> None:
    """Set what kvikio leaves poor by default (one thread, buffered reads); for the whole process."""
    defaults: Any = importlib.import_module("kvikio.defaults")
    defaults.set({"num_threads": threads, "task_size": task_bytes, "auto_direct_io_read": True})


def open_cufile(path: Path) -> Any:
    """A kvikio.CuFile for reading. Raises what kvikio raises."""
    return importlib.import_module("kvikio").CuFile(path, "r")


def gds_state(path: Path | None) -> tuple[bool, str]:
    """(GPUDirect Storage can be used, what is found), for ``doctor``."""
    reason = why_unavailable(path)
    if reason:
        return False, reason
    version = getattr(importlib.import_module("kvikio"), "__version__", "of unknown version")
    try:
        driver: Any = importlib.import_module("kvikio.cufile_driver")
        available = bool(driver.get("is_gds_available"))
    except Exception as error:
        return False, f"kvikio {version} reads through POSIX threads; cuFile: {error}"
    if available:
        return True, f"kvikio {version} with GPUDirect Storage"
    return False, f"kvikio {version} reads through POSIX threads; cuFile finds no GPUDirect Storage on this machine"


def _driver_problem() -> str:
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return (
            "libcuda.so.1 is missing, which comes with the NVIDIA driver; kvikio needs it even to read into host memory"
        )
    version = ctypes.c_int(0)
    result = library.cuDriverGetVersion(ctypes.byref(version))
    if result != 0 or version.value == 0:
        return f"the NVIDIA driver does not answer (cuDriverGetVersion: error {result}); is nvidia-smi working?"
    return ""


def _probe_read(path: Path) -> str:
    size = min(_PROBE_BYTES, path.stat().st_size)
    if size == 0:
        return ""
    target = bytearray(size)
    with open_cufile(path) as file:
        count = file.pread(target, size, 0).get()
    with path.open("rb") as plain:
        expected = plain.read(size)
        os.posix_fadvise(plain.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if count != size or target != expected:
        return f"a probe read of {size} bytes of {path} brought wrong bytes"
    return ""
