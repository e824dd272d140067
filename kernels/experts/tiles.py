"""Which expert and which rows a program of a grouped product works on. Importing this module imports triton.

Assignments are sorted by expert, so the rows of expert e are [offsets[e], offsets[e + 1]). A launch covers some experts
(those whose weights have arrived); their row tiles are numbered one after the other, and each program finds its own by
a prefix sum over tile counts. Nothing of this is computed on the host, so a launch needs no synchronisation: the host
only knows an upper bound of the number of tiles, and surplus programs leave at once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from batchgen_lite.kernels.launch import ceil_div


def tile_bound(rows: int, experts: int, block_m: int) -> int:
    """At most this many tiles hold ``rows`` rows split over ``experts`` groups in any way: every group may leave one
    tile unfilled, and no group that has rows takes more than one tile beyond its full ones."""
    filled = min(rows, experts)
    return 0 if filled == 0 else (rows - filled) // block_m + filled


def row_tiles(rows: int, block_m: int) -> int:
    """Tiles of ``rows`` rows of a single matrix."""
    return ceil_div(rows, block_m)


@triton.jit
def find_tile(offsets, experts, num_experts, tile, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr):
    """(expert, first row, row behind the expert's last) of tile number ``tile``; expert -1 behind the last tile.

    ``offsets`` int32 [E + 1]; ``experts`` int32 [num_experts]: the experts of this launch.
    """
    slot = tl.arange(0, BLOCK_E)
    present = slot < num_experts
    expert = tl.load(experts + slot, mask=present, other=0)
    begin = tl.load(offsets + expert, mask=present, other=0)
    end = tl.load(offsets + expert + 1, mask=present, other=0)
    tiles = (end - begin + BLOCK_M - 1) // BLOCK_M  # 0 for an expert without rows
    behind = tl.cumsum(tiles, 0)
    first = behind - tiles
    mine = (first <= tile) & (tile < behind)  # true for at most one expert
    found = tl.sum(tl.where(mine, expert + 1, 0), 0) - 1
    row = tl.sum(tl.where(mine, begin + (tile - first) * BLOCK_M, 0), 0)
    last = tl.sum(tl.where(mine, end, 0), 0)
    return found, row, last
