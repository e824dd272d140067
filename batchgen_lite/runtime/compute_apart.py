"""Parallel computing beside the engine, on a thread that ends with it."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

Result = TypeVar("Result")


def compute_apart(threads: int, compute: Callable[[], Result]) -> Result:
    """What ``compute`` returns or raises, run on a thread of its own with torch on ``threads`` threads.

    Every thread that computes in parallel gets a team of OpenMP workers, for as long as it lives. With two teams there
    are more of them than cores, and GNU's OpenMP then lets workers sleep between any two operations instead of spinning
    for a moment (libgomp, gomp_throttled_spin_count_var): a tile of 16 tokens took 1.2 times as long for it. So only
    the engine's thread keeps a team; what else computes does it here, and leaves the process's setting as it was.
    """
    before = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(1, "compute", initializer=torch.set_num_threads, initargs=(threads,)) as pool:
            return pool.submit(compute).result()
    finally:
        torch.set_num_threads(before)
