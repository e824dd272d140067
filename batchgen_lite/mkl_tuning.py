"""Make MKL give a row of a product the same bits whatever else is in the product.

torch.bmm and torch.mm are MKL's. With AVX-512 on its maker's processors, MKL chooses among kernels that add up in
different orders by how many rows and columns there are: a block of 4 query rows got other bits than the same rows in a
block of 16, with heads of 128 channels. In its strict reproducible mode of AVX2 it does not (tests/kernels/
test_cpu_exactness.py), and neither does it by itself on processors without AVX-512 or of another maker, where that mode
is not to be had.

The variable is read when MKL is first used. Source: Intel's developer guide for oneMKL, "Conditional Numerical
Reproducibility".
"""

from __future__ import annotations

import os
from pathlib import Path

CPU_INFO = Path("/proc/cpuinfo")
MODE = "AVX2,STRICT"


def tune_mkl() -> None:
    """Set the mode for this process and its children where it is needed, unless the user has chosen one."""
    if _needs_mode():
        os.environ.setdefault("MKL_CBWR", MODE)


def _needs_mode() -> bool:
    try:
        first = CPU_INFO.read_text(errors="replace").partition("\n\n")[0]
    except OSError:
        return False
    fields = {key.strip(): value.split() for key, _, value in (line.partition(":") for line in first.splitlines())}
    return fields.get("vendor_id") == ["GenuineIntel"] and "avx512f" in fields.get("flags", [])
