"""Streaming units: a model's weights as modules in sweep order, each an ordered list of row tiles.

A tile is what one GEMM stage consumes: some rows of one matrix, with the byte ranges that hold them. Its boundaries
are a function of the model alone, never of a budget, so that the arithmetic, and with it every bit of the results, is
the same however much of the model is resident. How many tiles travel in one read is a separate matter (stream.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import lcm

from batchgen_lite.offload.checkpoint.matrix import Matrix
from batchgen_lite.offload.checkpoint.tensors import Extent

TILE_BYTES = 16 << 20  # of packed weights: large enough to saturate a drive, small enough for a ring of a few
ROW_STEP = 64  # tile rows are a multiple of this (and of the matrix' own step)
SHARED_EXPERT = -1  # tiles that belong to no routed expert: every token needs them


@dataclass(frozen=True, slots=True, eq=False)
class Tile:
    """Rows [start, stop) of ``matrix``. ``role``: "linear", or "gate_up" / "down" of an expert or dense FFN."""

    module: int
    role: str
    matrix: Matrix
    start: int
    stop: int
    expert: int
    extents: tuple[Extent, ...]

    @property
    def nbytes(self) -> int:
        return sum(extent.nbytes for extent in self.extents)


@dataclass(frozen=True, slots=True, eq=False)
class Module:
    """One weight-bearing step of a sweep. ``kind``: "qkv" | "out" | "router" | "experts" | "dense" | "head" | ...

    ``layer`` is -1 for the head. ``routed``: its tiles carry expert numbers and only chosen experts are needed.
    """

    index: int
    kind: str
    layer: int
    tiles: tuple[Tile, ...]
    routed: bool = False
    nbytes: int = field(default=0)


def tile_rows(matrix: Matrix) -> int:
    """Rows of a full tile of ``matrix``: about TILE_BYTES, a multiple of its row step and of ROW_STEP."""
    total = sum(extent.nbytes for extent in matrix.extents(0, matrix.rows))
    if total <= TILE_BYTES:
        return matrix.rows
    step = lcm(matrix.row_step, ROW_STEP)
    return max(step, TILE_BYTES * matrix.rows // total // step * step)


def cut(matrix: Matrix) -> list[tuple[int, int]]:
    """Row ranges of the tiles of ``matrix``."""
    step = tile_rows(matrix)
    return [(start, min(start + step, matrix.rows)) for start in range(0, matrix.rows, step)]
