"""Token rows as GEMMs see them: in whole blocks, so that a row's bits do not depend on how many rows there are."""

from __future__ import annotations

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


def spans(rows: int) -> list[tuple[int, int]]:
    """First and end row of each product that together do ``rows`` rows, padded to blocks or half ones: as few as
    SPAN_ROWS allows, their sizes a block apart at most."""
    block = HALF_BLOCK if rows % ROW_PADDING else ROW_PADDING
    count = max(1, -(-rows // SPAN_ROWS))
    ends = [rows // block * (number + 1) // count * block for number in range(count)]
    return list(zip([0, *ends], ends, strict=False))


def column_stride(columns: int) -> int:
    """Floats from one row to the next of a matrix [features, ``columns``] that will be read transposed; ``columns``
    padded. An odd number of cache lines (a block is one line): a stride of many even ones maps the lines that a token's
    features lie in to a few sets of the caches. Transposing 250 tokens of 3,072 took 6 times as long with it."""
    return columns if columns // ROW_PADDING % 2 else columns + ROW_PADDING
