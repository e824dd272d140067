"""How wide routed experts' weights are widened, which is how wide the rows they are multiplied with must lie."""

from __future__ import annotations

from dataclasses import dataclass

from batchgen_lite.kernels.experts.reference import stage_columns
from batchgen_lite.offload.tiles import SHARED_EXPERT, Module, Tile


@dataclass(frozen=True, slots=True)
class ExpertColumns:
    """Of all stages of a layer's routed experts; see kernels/products.py: padded_columns."""

    gate_up: int
    down: int

    def of(self, tile: Tile) -> int:
        """Of the stages of ``tile``."""
        return self.gate_up if tile.role == "gate_up" else self.down


def expert_columns(module: Module) -> ExpertColumns:
    """Those of ``module``, which has routed experts. They depend on its matrices alone, so that a row's bits do not
    depend on who computes an expert, nor on how many rows it has."""
    routed = [tile for tile in module.tiles if tile.expert != SHARED_EXPERT]
    return ExpertColumns(*(_common([tile for tile in routed if tile.role == role]) for role in ("gate_up", "down")))


def _common(tiles: list[Tile]) -> int:
    """Padded only if all may be: a layer's experts take rows from one place."""
    columns = {stage_columns(tile.matrix) for tile in tiles}
    return columns.pop() if len(columns) == 1 else tiles[0].matrix.cols
