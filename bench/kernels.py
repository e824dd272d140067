"""Speed of every Triton kernel against what the card can do.

    python bench/kernels.py [--json FILE] [--dtype bf16|fp16] [--only TEXT] [--bandwidth GB/s --tflops TFLOP/s]

The limit of a kernel is the longer of two times: its bytes at the rate of a device copy, its operations at the rate of
a large cuBLAS product, both measured first. The share is limit / time. Kernels of a few microseconds are bound by
neither, but by launching; their share is low by nature. Times are medians over CUDA events with a cold L2 cache.

Without a CUDA device nothing can be measured; then the table shows each kernel's bytes, operations and limit at the
given rates.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from kernel_workloads import Work, workloads

from batchgen_lite.kernels.availability import unavailable_reason

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


def show(rows: list[dict[str, object]]) -> None:
    columns = list(rows[0])
    print("  ".join(f"{name:>42}" if name == "kernel" else f"{name:>11}" for name in columns))
    for figures in rows:
        cells = [f"{v:>11.2f}" if isinstance(v, float) else f"{v!s:>11}" for v in list(figures.values())[1:]]
        print("  ".join([f"{figures['kernel']!s:>42}", *cells]))


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure the Triton kernels against the limits of the card.")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--dtype", choices=("bf16", "fp16"), default="bf16")
    parser.add_argument("--only", default="", help="only kernels whose name contains this")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--bandwidth", type=float, default=256.0, help="GB/s, where nothing is measured")
    parser.add_argument("--tflops", type=float, default=60.0, help="TFLOP/s, where nothing is measured")
    options = parser.parse_args()
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[options.dtype]
    device = torch.device("cuda")
    reason = unavailable_reason(device)
    if reason is None:
        card = torch.cuda.get_device_name(device)
        bandwidth, rate = card_rates(device, dtype, options.repeats)
    else:
        card, device = f"nothing measured: {reason}", torch.device("meta")
        bandwidth, rate = options.bandwidth * 1e9, options.tflops * 1e12
    print(f"{card}; limits {bandwidth / 1e9:.0f} GB/s, {rate / 1e12:.1f} TFLOP/s")
    rows = []
    for work in workloads(device, dtype):
        if options.only in work.name:
            seconds = None if reason is not None else measure(work, device, options.repeats)
            rows.append(row(work, seconds, bandwidth, rate))
    if not rows:
        parser.error(f"no kernel's name contains {options.only!r}")
    show(rows)
    if options.json is not None:
        report = {"card": card, "bytes_per_s": bandwidth, "operations_per_s": rate, "kernels": rows}
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
