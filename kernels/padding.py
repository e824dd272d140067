"""Token rows as GEMMs see them: in whole blocks, so that a row's bits do not depend on how many rows there are."""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate

ROW_PADDING = 16
"""MKL takes other paths below 16 rows, and oneDNN below 2; a multiple keeps every row's bits (tests/kernels). It is
also as many floats as the widest vector register holds."""

SPAN_ROWS = 7 * ROW_PADDING
"""Rows of a product at most. More gain nothing, but every other number of them is a kernel that oneDNN makes and keeps;
and an odd number of cache lines from one row of a result to the next is best for reading it by columns."""

HALF_BLOCK = ROW_PADDING // 2
"""As many floats as AVX2's registers hold: what an expert's rows may be padded to there (kernels/products.py)."""


def padded(rows: int, block: int = ROW_PADDING) -> int:
    """``rows`` rounded up to whole blocks."""
    return -(-rows // block) * block


@lru_cache(maxsize=4096)
def spans(rows: int) -> tuple[tuple[int, int], ...]:
    """First and end row of each product that together do ``rows`` rows, padded to blocks or half ones. Of half blocks
    as few as SPAN_ROWS allows, their sizes a half apart at most; of whole ones products of 7, 4 and 3 blocks.

    oneDNN's products with 1,024 columns of weights (4 KiB from row to row) do what is left beyond 64 rows, if that is
    one block or two, at half to 0.9 of their rate: 80 and 96 rows come out at 90 and 103 GFLOP/s a core where 48, 64
    and 112 reach 110. With other columns all sizes from 48 on are alike."""
    if rows % ROW_PADDING:
        count = -(-rows // SPAN_ROWS)
        ends = [rows // HALF_BLOCK * (number + 1) // count * HALF_BLOCK for number in range(count)]
    else:
        ends = [blocks * ROW_PADDING for blocks in accumulate(_widths(rows // ROW_PADDING))]
    return tuple(zip([0, *ends], ends, strict=False))


def _widths(blocks: int) -> list[int]:
    """Blocks of each product: 7s, 4s and 3s wherever they make up ``blocks``, as many of the larger as can be."""
    if blocks < 6:
        return [blocks]
    sevens = next(count for count in range(blocks // 7, -1, -1) if blocks - 7 * count not in (1, 2, 5))
    rest = blocks - 7 * sevens
    fours = next(count for count in range(rest // 4, -1, -1) if (rest - 4 * count) % 3 == 0)
    return [7] * sevens + [4] * fours + [3] * ((rest - 4 * fours) // 3)


def column_stride(columns: int) -> int:
    """Floats from one row to the next of a matrix [features, ``columns``] that will be read transposed; ``columns``
    padded. An odd number of cache lines (a block is one line): a stride of many even ones maps the lines that a token's
    features lie in to a few sets of the caches. Transposing 250 tokens of 3,072 took 6 times as long with it."""
    return columns if columns // ROW_PADDING % 2 else columns + ROW_PADDING
