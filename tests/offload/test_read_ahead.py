"""What travels together: large loads where it is known beforehand what is needed, smaller ones behind a router."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from streams import layer_modules

from batchgen_lite.offload.read_ahead import WAITED_PARTS, ReadAhead, Tier
from batchgen_lite.offload.tiles import Module

MOST, TILE = 600, 100  # bytes


def made(modules: Sequence[Module]) -> ReadAhead:
    sizes = {id(tile): TILE for module in modules for tile in module.tiles}
    return ReadAhead(modules, lambda tile: Tier.DISK, lambda tile: False, sizes, MOST)


def groups(ahead: ReadAhead) -> list[list[int]]:
    """Experts of the tiles that travel together, until something has to be waited for."""
    found = []
    while (group := ahead.peek()) is not None:
        ahead.take()
        found.append([tile.expert for tile in group[1]])
    return found


def sweep(
    ahead: ReadAhead, modules: Sequence[Module], counts: torch.Tensor, last: torch.Tensor
) -> list[list[list[int]]]:
    """The groups of each stretch between two routers' words."""
    ahead.begin_sweep(int(counts.sum()), int(last.sum()))
    stretches = [groups(ahead)]
    routed = [module for module in modules if module.routed]
    for module in routed:
        ahead.route(module, last if module is routed[-1] else counts)
        stretches.append(groups(ahead))
    return stretches


def test_loads_are_smaller_behind_a_router_that_was_waited_for() -> None:
    modules = layer_modules(layers=2, experts=16)
    ahead = made(modules)
    counts = torch.full((16,), 100)
    first = sweep(ahead, modules, counts, counts)
    waited = [group for group in first[1] if group and group[0] >= 0]
    assert max(map(len, waited)) == MOST // WAITED_PARTS // TILE
    assert sum(map(len, waited)) == len([tile for tile in modules[-1].tiles if tile.expert >= 0])
    read_ahead = [group for group in sweep(ahead, modules, counts, counts)[0] if group and group[0] >= 0]
    assert max(map(len, read_ahead)) == MOST // TILE


def test_the_last_layers_experts_are_expected_by_the_tokens_that_get_there() -> None:
    """Each of 16 experts is chosen by one token in 16. Of 160 tokens all are wanted, of two few; and what the few chose
    says no less about the next sweep than what many did."""
    modules = layer_modules(layers=2, experts=16)
    ahead = made(modules)
    counts, last = torch.full((16,), 10), torch.tensor([1, 1, *[0] * 14])
    for _ in range(6):
        sweep(ahead, modules, counts, last)
    assert ahead.waited_modules == 1 + 6  # the first layer before anything is known, and the last one always
    frequency = ahead._frequency
    few, many = (frequency[module.index] for module in reversed([module for module in modules if module.routed]))
    assert few.sum() == many.sum() == 1.0
