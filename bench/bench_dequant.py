"""How fast packed weights are widened to fp32: packed bytes per second, best of several runs.

python bench/bench_dequant.py [--threads 1] [--rows 1024] [--cols 4096]
"""

from __future__ import annotations

import argparse
import time

import torch

from batchgen_lite.kernels.dequant.rows import decode_rows
from batchgen_lite.kernels.dequant.sizes import SUPPORTED_ENCODINGS, row_bytes


def best_seconds(encoding: str, rows: int, cols: int, tries: int) -> float:
    packed = torch.randint(0, 256, (rows, row_bytes(encoding, cols)), dtype=torch.uint8)
    out = torch.empty(rows, cols)
    best = float("inf")
    for _ in range(tries):
        start = time.perf_counter()
        decode_rows(encoding, packed, out)
        best = min(best, time.perf_counter() - start)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--cols", type=int, default=4096)
    parser.add_argument("--tries", type=int, default=30)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(f"{options.rows} x {options.cols}, {options.threads} thread(s)")
    print(f"{'encoding':10}{'MB/s packed':>14}{'M weights/s':>14}")
    for encoding in SUPPORTED_ENCODINGS:
        seconds = best_seconds(encoding, options.rows, options.cols, options.tries)
        packed = options.rows * row_bytes(encoding, options.cols)
        print(f"{encoding:10}{packed / seconds / 1e6:14.0f}{options.rows * options.cols / seconds / 1e6:14.0f}")


if __name__ == "__main__":
    main()
