"""Matrix products of the CPU's path in fp32: oneDNN's where this torch has them for this processor, else torch.mm.

torch.mm is MKL's, which keeps to AVX2 on processors that are not its maker's. On two AVX-512 cores oneDNN reaches 350
to 470 GFLOP/s at 32 to 112 token rows where MKL reaches 190 to 210, and with AVX2 alone 210 to 250. Its bits depend
neither on how many columns there are, from 2 on, nor on the number of threads (tests/kernels/test_cpu_exactness.py).
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from batchgen_lite.kernels.padding import HALF_BLOCK, ROW_PADDING

Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

KERNEL_BYTES = 640 << 10
"""What oneDNN keeps for every other shape of operands, about (0.57 to 0.60 MB measured)."""


def _onednn() -> Product | None:
    """oneDNN's product, None where torch was built without it or the processor is none that its bits are known for."""
    if not torch.backends.mkldnn.is_available() or torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
        return None
    try:
        # What torch.compile calls for a linear layer: the one way to oneDNN's fp32 products from plain tensors.
        linear = torch.ops.mkldnn._linear_pointwise.default
    except AttributeError:
        return None

    def product(weights: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        if not rows.is_contiguous() and rows.stride() != (1, len(rows)):
            rows = rows.contiguous()  # it takes its slowest path, a thousand times slower, for rows that lie apart
        result: torch.Tensor = linear(weights, rows, None, "none", [], "")
        return result

    return product


def _mkl(weights: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return torch.mm(weights, rows.t())


_PRODUCT: Product = _onednn() or _mkl
USES_ONEDNN = _PRODUCT is not _mkl

EXPERT_PADDING = HALF_BLOCK if USES_ONEDNN and torch.backends.cpu.get_cpu_capability() == "AVX2" else ROW_PADDING
"""An expert's token rows are padded to a multiple of so many. With AVX2 24 rows take oneDNN three quarters of the time
of 32, and 8 rows that of 16; with AVX-512 24 take longer than 32."""

ALIASING_COLUMNS = 1024 if USES_ONEDNN and torch.backends.cpu.get_cpu_capability() == "AVX512" else 0
"""Weights of so many columns are slow as they are, see padded_columns; 0: none."""
COLUMN_PADDING = 16  # floats: one cache line, enough to move every row to another set


def padded_columns(columns: int) -> int:
    """With how many columns weights of ``columns`` columns, and the rows they are multiplied with, had better lie in
    memory; zeros are in those behind.

    1,024 columns lie 4 KiB apart from row to row, so that all rows which oneDNN's AVX-512 kernels go through at a time
    share one set of the first cache. 16, 32 and 80 token rows then reach 50, 87 and 88 GFLOP/s a core, and 99, 102 and
    106 with 16 columns more. Other widths between 512 and 4,096 gain nothing by it, multiples of 1,024 included, nor
    does AVX2. What is added are zeros, but the sums are formed in another order, so it is all of a matrix' products or
    none."""
    return columns + COLUMN_PADDING if columns == ALIASING_COLUMNS else columns


def product(weights: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """``weights`` fp32 [R, K], rows contiguous, times the transposed ``rows`` fp32 [n, K], at most SPAN_ROWS padded
    ones, contiguous or transposed so: fp32 [R, n], a new tensor."""
    return _PRODUCT(weights, rows)
