"""Timing launches on a card, and a kernel's share of what the card can do."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch
from kernel_workloads import Work

CACHE_FLUSH = 256 << 20
"""Bytes written between measurements: more than any L2 cache."""


def median_seconds(run: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Median device time of ``run`` over ``repeats`` runs, the first three (compilation) not counted."""
    flush = torch.empty(CACHE_FLUSH, dtype=torch.uint8, device=device)
    times = []
    for number in range(repeats + 3):
        flush.zero_()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        end.synchronize()
        if number >= 3:
            times.append(start.elapsed_time(end) / 1e3)
    return float(statistics.median(times))


def card_rates(device: torch.device, dtype: torch.dtype, repeats: int) -> tuple[float, float]:
    """(bytes/s of a device copy, read and written bytes counted; operations/s of a large product)."""
    source = torch.empty(512 << 20, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy = 2 * source.numel() / median_seconds(lambda: target.copy_(source), device, repeats)
    a, b = (torch.randn(4096, 4096, device=device).to(dtype) for _ in range(2))
    product = 2 * 4096**3 / median_seconds(lambda: a @ b, device, repeats)
    return copy, product


def measure(work: Work, device: torch.device, repeats: int) -> float:
    def run() -> None:
        for launch in work.launches:
            launch.run()

    return median_seconds(run, device, repeats)


def row(work: Work, seconds: float | None, bandwidth: float, rate: float) -> dict[str, object]:
    """Figures of one kernel. ``limit_us``: the least time; ``bound``: by what."""
    moving, computing = work.nbytes / bandwidth, work.operations / rate
    limit = max(moving, computing)
    figures: dict[str, object] = {
        "kernel": work.name,
        "MB": work.nbytes / 1e6,
        "GFLOP": work.operations / 1e9,
        "bound": "bytes" if moving >= computing else "operations",
        "limit_us": limit * 1e6,
    }
    if seconds is not None:
        figures |= {
            "time_us": seconds * 1e6,
            "GB_per_s": work.nbytes / seconds / 1e9,
            "TFLOP_per_s": work.operations / seconds / 1e12,
            "share": limit / seconds,
        }
    return figures
