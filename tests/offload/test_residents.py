"""Which tiles stay in memory, and how modules are cut into tiles."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
from streams import FakeMatrix, layer_modules

from batchgen_lite.offload.residents import choose_residents, tile_footprint
from batchgen_lite.offload.tiles import ROW_STEP, TILE_BYTES, cut

ALIGNMENT = 4096


def test_what_every_sweep_needs_comes_before_experts() -> None:
    modules = layer_modules(layers=4, experts=8)
    always = [tile for module in modules if not module.routed for tile in module.tiles]
    budget = sum(tile_footprint(tile, ALIGNMENT) for tile in always)
    assert set(map(id, choose_residents(modules, budget, ALIGNMENT))) == set(map(id, always))


def test_experts_are_spread_evenly_over_the_layers() -> None:
    modules = layer_modules(layers=4, experts=8)
    size = tile_footprint(modules[1].tiles[0], ALIGNMENT)
    always = sum(tile_footprint(tile, ALIGNMENT) for m in modules if not m.routed for tile in m.tiles)
    chosen = choose_residents(modules, always + 21 * size, ALIGNMENT)
    per_layer = Counter(modules[tile.module].layer for tile in chosen if tile.expert >= 0)
    assert sum(per_layer.values()) == 21
    assert max(per_layer.values()) - min(per_layer.values()) <= 1


@pytest.mark.parametrize("share", [0.0, 0.1, 0.37, 0.9, 2.0])
def test_the_budget_is_kept_and_well_used(share: float) -> None:
    modules = layer_modules(layers=5, experts=7)
    sizes = [tile_footprint(tile, ALIGNMENT) for module in modules for tile in module.tiles]
    budget = int(share * sum(sizes))
    used = sum(tile_footprint(tile, ALIGNMENT) for tile in choose_residents(modules, budget, ALIGNMENT))
    assert used <= budget
    assert used >= min(budget, sum(sizes)) - max(sizes)


@pytest.mark.parametrize("rows", [1, 64, 1000, TILE_BYTES, TILE_BYTES + 1, 3 * TILE_BYTES + 777])
def test_tiles_cover_a_matrix_without_gaps_and_stay_small(rows: int) -> None:
    ranges = cut(FakeMatrix(0, rows))
    assert ranges[0][0] == 0
    assert ranges[-1][1] == rows
    assert all(before[1] == after[0] for before, after in pairwise(ranges))
    assert all(stop - start <= max(TILE_BYTES, ROW_STEP) for start, stop in ranges)
    assert all(start % ROW_STEP == 0 for start, _ in ranges)
