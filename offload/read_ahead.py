"""What to bring next: the order of a sweep's tiles, and which experts to bring before their router has spoken.

Ahead of the router nobody knows which experts a layer will need. With large batches that does not matter: nearly all
are touched, and reading all of them keeps the link busy. With small ones it is waste. So for each layer the share of
experts that the coming tokens will touch is predicted from how often each expert was chosen so far; at SPECULATE_FROM
and above all are brought ahead, below it the stream waits for the router and brings only what was chosen. What the
router overtakes is narrowed to the chosen experts at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from itertools import chain

import torch

from batchgen_lite.offload.tiles import SHARED_EXPERT, Module, Tile

SWEEPS_AHEAD = 1  # how far the producer may be ahead of the consumer
SPECULATE_FROM = 0.9  # predicted share of touched experts from which reading all of them ahead pays
WAITED_PARTS = 2
"""What had to wait for its router travels in parts of so many: nobody computes until the first one is there, and when
the last ones have come, all at about the same time, what they brought is still to be computed. A job's last sweeps, of
one row to five, take 8 to 12 % less so; with 4 parts no less."""
FORGET = 0.5  # weight of the newest sweep in the running average of routing frequencies


class Tier(Enum):
    """Where a tile stays between sweeps."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"


Group = tuple[int, tuple[Tile, ...]]
"""The sweep they are for, and tiles of one module and one tier that travel together."""


class ReadAhead:
    """Yields groups in the order in which a sweep uses them, at most SWEEPS_AHEAD sweeps ahead.

    ``here``: whether a tile lies where it is computed with, so that nothing has to be brought; ``sizes``: bytes by
    id(tile), of which a group has at most ``most``.
    """

    def __init__(
        self,
        modules: Sequence[Module],
        tier: Callable[[Tile], Tier],
        here: Callable[[Tile], bool],
        sizes: dict[int, int],
        most: int,
    ) -> None:
        self.modules = modules
        self.waited_modules = 0  # expert modules that were brought only after their router had spoken
        self.ahead_modules = 0
        self._tier, self._here, self._sizes, self._most = tier, here, sizes, most
        self._frequency: dict[int, torch.Tensor] = {}  # module -> running share of tokens that chose each expert
        self._chosen: dict[tuple[int, int], frozenset[int]] = {}  # (sweep, module) -> experts that were chosen
        self._sweep = self._tokens = self._last_tokens = 0
        self._last_layer = max((module.layer for module in modules), default=0)
        self.restart()

    def restart(self) -> None:
        """Begin anew before the first module of the next sweep."""
        self._chosen.clear()
        self._groups: Iterator[Group | None] = self._produce(self._sweep + 1)
        self._next: Group | None = None

    def tiers_changed(self) -> None:
        """Tiles stay elsewhere from now on: a group that was cut before, and has not been taken, is cut anew."""
        if self._next is not None:
            sweep, tiles = self._next
            self._next = None
            self._groups = chain(self._cut(list(tiles), sweep, self._most), self._groups)

    def begin_sweep(self, tokens: int, last: int | None = None) -> int:
        """A sweep over ``tokens`` tokens begins, ``last`` of them in the last layer's feed-forward network (None =
        all); returns its number."""
        self._tokens, self._last_tokens = tokens, tokens if last is None else last
        self._sweep += 1
        # The producer may still have to step over unneeded tiles of the sweep before this one.
        self._chosen = {key: chosen for key, chosen in self._chosen.items() if key[0] >= self._sweep - 1}
        return self._sweep

    def route(self, module: Module, counts: torch.Tensor) -> frozenset[int]:
        """A router has spoken: tokens per expert [E], on the host. Returns the chosen experts."""
        chosen = frozenset(counts.nonzero().flatten().tolist())
        self._chosen[self._sweep, module.index] = chosen
        share = counts.double() / max(1, self._tokens_of(module))
        before = self._frequency.get(module.index)
        self._frequency[module.index] = share if before is None else before.lerp(share, FORGET)
        return chosen

    def chosen(self, module: Module) -> frozenset[int]:
        """What this sweep's router of ``module`` chose; empty before it has."""
        return self._chosen.get((self._sweep, module.index), frozenset())

    def needed(self, tile: Tile, sweep: int) -> bool:
        """Whether ``sweep`` needs ``tile``, as far as is known."""
        if tile.expert == SHARED_EXPERT:
            return True
        chosen = self._chosen.get((sweep, tile.module))
        return chosen is None or tile.expert in chosen

    def peek(self) -> Group | None:
        """What to bring next, narrowed to what is known now; None while that waits, for a router or a sweep."""
        while True:
            if self._next is None:
                self._next = next(self._groups)
                if self._next is None:
                    return None
            sweep, tiles = self._next
            needed = tuple(tile for tile in tiles if self.needed(tile, sweep))
            if needed:
                return sweep, needed
            self._next = None

    def take(self) -> None:
        """What ``peek`` gave is on its way."""
        self._next = None

    def _produce(self, sweep: int) -> Iterator[Group | None]:
        """Endless: the next group, or None while it must wait."""
        while True:
            while sweep > self._sweep + SWEEPS_AHEAD:
                yield None  # a ring would hold the same weights twice
            for module in self.modules:
                missing = [tile for tile in module.tiles if not self._here(tile)]
                if not missing:
                    continue
                ahead = not module.routed or self._expects_all(module)
                while not ahead and (sweep, module.index) not in self._chosen:
                    yield None
                if module.routed:
                    if ahead:
                        self.ahead_modules += 1
                    else:
                        self.waited_modules += 1
                yield from self._cut(missing, sweep, self._most if ahead else self._most // WAITED_PARTS)
            if all(self._here(tile) for module in self.modules for tile in module.tiles):
                while True:
                    yield None
            sweep += 1

    def _cut(self, tiles: list[Tile], sweep: int, most: int) -> Iterator[Group]:
        """Consecutive needed tiles that travel together, up to ``most`` bytes, each tier's apart."""
        group: list[Tile] = []
        size = 0
        for tile in tiles:
            if not self.needed(tile, sweep):
                continue
            nbytes = self._sizes[id(tile)]
            if group and (size + nbytes > most or self._tier(tile) is not self._tier(group[0])):
                yield sweep, tuple(group)
                group, size = [], 0
            group.append(tile)
            size += nbytes
        if group:
            yield sweep, tuple(group)

    def _expects_all(self, module: Module) -> bool:
        """Whether the coming tokens are expected to touch nearly every expert: mean of 1 - (1 - f)^tokens."""
        frequency, tokens = self._frequency.get(module.index), self._tokens_of(module)
        if frequency is None or tokens == 0:
            return False
        touched = 1.0 - (1.0 - frequency.clamp(max=1.0)) ** tokens
        return float(touched.mean()) >= SPECULATE_FROM

    def _tokens_of(self, module: Module) -> int:
        return self._last_tokens if module.layer == self._last_layer else self._tokens
