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
import sys
from pathlib import Path

import torch
from kernel_rates import card_rates, measure, row
from kernel_workloads import workloads

from batchgen_lite.kernels.availability import unavailable_reason


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
