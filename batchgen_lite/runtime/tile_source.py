"""Where modules on the CPU get their weights from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch

from batchgen_lite.offload.held_tiles import HeldTile
from batchgen_lite.offload.tiles import Module, Tile


class TileSource(Protocol):
    """A WeightStream, or one that looks at weights on the way."""

    @property
    def modules(self) -> Sequence[Module]: ...

    def tiles(self, module: Module, counts: torch.Tensor | None = None) -> Iterator[tuple[Tile, list[torch.Tensor]]]:
        """See WeightStream.tiles."""
        ...


class HeldTileSource(Protocol):
    """A WeightStream, for those who compute with several tiles at a time."""

    def can_hold(self, module: Module) -> bool:
        """See WeightStream.can_hold."""
        ...

    def held(
        self, module: Module, counts: torch.Tensor | None, idle_since: Callable[[], float | None]
    ) -> Iterator[HeldTile]:
        """See WeightStream.held."""
        ...
