"""What this process uses now and has used at most, as the kernel counts it."""

from __future__ import annotations

from pathlib import Path

import psutil


def resident_bytes() -> int:
    """Resident set size: interpreter, libraries, arenas; without the page cache."""
    return int(psutil.Process().memory_info().rss)


def private_bytes() -> int:
    """Of ``resident_bytes`` what is no file's: heap, arenas, stacks."""
    memory = psutil.Process().memory_info()
    return int(memory.rss - memory.shared)


def peak_resident_bytes(proc: Path = Path("/proc")) -> int:
    """The highest resident set size so far (VmHWM), or since ``reset_peak``. Where the kernel does not tell: the
    present one."""
    try:
        lines = (proc / "self" / "status").read_text().splitlines()
    except OSError:
        return resident_bytes()
    for line in lines:
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return resident_bytes()


def reset_peak(proc: Path = Path("/proc")) -> bool:
    """Let the peak start again from the present use; False where the kernel does not allow it."""
    try:
        # proc(5): writing 5 to clear_refs resets the peak resident set size.
        (proc / "self" / "clear_refs").write_text("5")
    except OSError:
        return False
    return True
