"""How fast packed weights are widened to fp32: packed bytes per second, best of several runs.

    python bench/bench_dequant.py [--threads 1] [--rows 512] [--cols 4096]

Where the output is larger than the cache, writing it is a good part of the time; the rows are those of a typical tile.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial

import torch
from figures import Figure, best, copy_rate

from batchgen_lite.kernels.dequant.fp8_blocks import decode_fp8_blocks
from batchgen_lite.kernels.dequant.pairs import decode_grouped_int4, decode_mxfp4_pairs
from batchgen_lite.kernels.dequant.rows import decode_rows
from batchgen_lite.kernels.dequant.sizes import SUPPORTED_ENCODINGS, row_bytes
from batchgen_lite.offload.checkpoint.awq_matrix import AwqMatrix
from batchgen_lite.offload.checkpoint.gptq_matrix import GptqMatrix
from batchgen_lite.offload.checkpoint.tensors import Extent, TensorInfo

GROUP = 128

Case = tuple[str, int, Callable[[], None]]


def random_bytes(rows: int, nbytes: int) -> torch.Tensor:
    return torch.randint(0, 256, (rows, nbytes), dtype=torch.uint8)


def row_cases(rows: int, cols: int, out: torch.Tensor) -> Iterator[Case]:
    """Encodings whose rows hold everything."""
    for encoding in SUPPORTED_ENCODINGS:
        packed = random_bytes(rows, row_bytes(encoding, cols))
        if encoding == "F8_E4M3":
            packed &= 0x7E  # weights hold no NaN, for which there is a slower path
        yield encoding, packed.numel(), partial(decode_rows, encoding, packed, out)


def companion_cases(rows: int, cols: int, out: torch.Tensor) -> Iterator[Case]:
    """Layouts of safetensors checkpoints, with scales apart."""
    codes, fp8 = random_bytes(rows, cols // 2), random_bytes(rows, cols) & 0x7E
    exponents = random_bytes(rows, cols // 32)
    scales = torch.rand(rows, cols // GROUP)
    grid = torch.rand(-(-rows // GROUP), -(-cols // GROUP))
    yield "int4 rows", codes.numel(), lambda: decode_grouped_int4(codes, scales, None, out)
    yield "int4 zeros", codes.numel(), lambda: decode_grouped_int4(codes, scales, scales, out)
    yield "mxfp4 pairs", codes.numel(), lambda: decode_mxfp4_pairs(codes, exponents, out)
    yield "fp8 blocks", fp8.numel(), lambda: decode_fp8_blocks(fp8, grid, 0, (GROUP, GROUP), out)
    groups = cols // GROUP
    words = Extent(0, 0, rows * cols // 2)
    zeros = TensorInfo("qzeros", "I32", (groups, rows // 8), Extent(0, 0, groups * rows // 2))
    halves = TensorInfo("scales", "F16", (groups, rows), Extent(0, 0, groups * rows * 2))
    parts = [random_bytes(1, extent.nbytes)[0] for extent in (words, zeros.extent, halves.extent)]
    gptq = GptqMatrix(TensorInfo("qweight", "I32", (cols // 8, rows), words), zeros, halves, None, GROUP, 1)
    awq = AwqMatrix(TensorInfo("qweight", "I32", (cols, rows // 8), words), zeros, halves, GROUP)
    yield "gptq", codes.numel(), lambda: gptq.decode(parts, (0, rows), (0, rows), out)
    yield "awq", codes.numel(), lambda: awq.decode(parts, (0, rows), (0, rows), out)


def measure(rows: int = 512, cols: int = 4096, tries: int = 10) -> list[Figure]:
    """For ``bench/run.py``, on one thread. Reference: a copy in memory of as many bytes as are written."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        out = torch.empty(rows, cols)
        copying = out.numel() * out.element_size() / copy_rate()
        return [
            Figure(name, rows * cols / seconds / 1e6, "M weights/s", seconds / copying)
            for cases in (row_cases, companion_cases)
            for name, _, decode in cases(rows, cols, out)
            for seconds in [best(decode, tries)]
        ]
    finally:
        torch.set_num_threads(threads)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--cols", type=int, default=4096)
    parser.add_argument("--tries", type=int, default=30)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rows, cols = options.rows, options.cols
    out = torch.empty(rows, cols)
    print(f"{rows} x {cols}, {options.threads} thread(s)")
    print(f"{'format':12}{'MB/s packed':>14}{'M weights/s':>14}")
    for cases in (row_cases, companion_cases):
        for name, nbytes, decode in cases(rows, cols, out):
            seconds = best(decode, options.tries)
            print(f"{name:12}{nbytes / seconds / 1e6:14.0f}{rows * cols / seconds / 1e6:14.0f}")


if __name__ == "__main__":
    main()
