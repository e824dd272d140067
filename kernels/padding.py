"""Row padding: GEMMs see token rows in whole blocks, so that a row's bits do not depend on how many rows there are."""

from __future__ import annotations

ROW_PADDING = 16  # MKL takes other paths below 16 rows; a multiple keeps every row's bits (tests/kernels)


def padded(rows: int) -> int:
    """``rows`` rounded up to whole blocks of ROW_PADDING."""
    return -(-rows // ROW_PADDING) * ROW_PADDING


def column_stride(columns: int) -> int:
    """Floats from one row to the next of a matrix [features, ``columns``] that will be read transposed; ``columns``
    padded. An odd number of cache lines (a block is one line): a stride of many even ones maps the lines that a token's
    features lie in to a few sets of the caches. Transposing 250 tokens of 3,072 took 6 times as long with it."""
    return columns if columns // ROW_PADDING % 2 else columns + ROW_PADDING
