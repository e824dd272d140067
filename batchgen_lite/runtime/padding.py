"""Row padding: GEMMs see token rows in whole blocks, so that a row's bits do not depend on how many rows there are."""

from __future__ import annotations

ROW_PADDING = 16  # MKL takes other paths below 16 rows; a multiple keeps every row's bits (tests/kernels)


def padded(rows: int) -> int:
    """``rows`` rounded up to whole blocks of ROW_PADDING."""
    return -(-rows // ROW_PADDING) * ROW_PADDING
