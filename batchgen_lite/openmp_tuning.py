"""Make idle OpenMP workers sleep soon: the cores are not this process's alone.

Between two operations GNU's OpenMP lets workers spin for some milliseconds. That saves waking them, but it takes the
core from whatever else wants it: a browser, the threads that read weights, or the very thread that all wait for.
Measured on two cores, one job on a small resident model, alone and beside one busy process: 36 and 129 s as the
library has it, 42 and 50 s with 300 turns, 35 and 63 s with 1,000, 32 and 283 s with 20,000. A sweep of 142 tokens over
a model of 3.4 GB that streams: 1.45 and 2.0 s with 300, 1.16 and 2.3 s with 1,000, 1.18 and 3.3 s with 3,000.

The variable is read when the library is loaded, so it has to be set before torch is imported.
"""

from __future__ import annotations

import os

SPINS = 1000
"""Turns of the waiting loop, of some tens of cycles each: some twenty microseconds, the time between two operations of
a tile."""


def tune_openmp() -> None:
    """Set it for this process and its children, unless the user has said how OpenMP is to wait. Without effect where
    torch is loaded already."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", str(SPINS))
