"""How attention on the CPU cuts its work into calls; arithmetic only, so that memory can be planned without torch."""

from __future__ import annotations

PAGE = 64  # positions in a page
BLOCK_ROWS = (4, 8, 16, 32, 64)  # query rows of a block; a span takes the smallest that holds it

BLOCKS = 16
"""Blocks that go through one call at least; every call takes a multiple."""
MOST_BLOCKS = 64
"""More gain nothing: calls are large enough by then to weigh more than what starts them."""
PAGE_ELEMENTS = 1 << 20
"""Elements of keys or values that a call widens, 4 MiB of fp32: what stays in the last cache beside the rest."""


def blocks_at_once(rows: int, kv_heads: int, depth: int) -> int:
    """Blocks of ``rows`` query rows for one call, where a page holds ``kv_heads`` heads of ``depth`` channels.

    With few rows a block is little work for many calls (measured with 4 rows of 4 heads of 64, 174 sequences: 13.2 ms
    a layer by 16 blocks, 8.4 by 64); with many, or with large pages, more of them would leave the cache.
    """
    by_rows = BLOCKS * BLOCK_ROWS[-1] // rows
    by_pages = PAGE_ELEMENTS // (kv_heads * PAGE * depth)
    return max(1, min(MOST_BLOCKS, by_rows, by_pages) // BLOCKS) * BLOCKS


def page_elements(kv_heads: int, depth: int) -> int:
    """Elements of keys or values that a call widens at most."""
    return max(PAGE_ELEMENTS, BLOCKS * kv_heads * PAGE * depth)
