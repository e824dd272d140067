"""A model's weight-bearing steps in the order in which a sweep needs them."""

from __future__ import annotations

from collections.abc import Sequence

from batchgen_lite.models.weights import FFNWeights, GQAWeights, ModelWeights
from batchgen_lite.offload.checkpoint.matrix import Matrix
from batchgen_lite.offload.tiles import SHARED_EXPERT, Module, Tile, cut


def modules_of(weights: ModelWeights) -> tuple[Module, ...]:
    """Every streamed module in the order in which a sweep needs it. Vectors and norms are not streamed."""
    builder = _Builder()
    for number, layer in enumerate(weights.layers):
        attention = layer.attention
        if isinstance(attention, GQAWeights):
            builder.linear("qkv", number, attention.qkv)
        else:
            for kind in ("q", "q_a", "q_b", "kv_a", "kv_b"):
                matrix = getattr(attention, kind)
                if matrix is not None:
                    builder.linear(kind, number, matrix)
        builder.linear("out", number, attention.out)
        if layer.dense is not None:
            builder.ffn("dense", number, [(SHARED_EXPERT, layer.dense)], routed=False)
        else:
            assert layer.router is not None
            builder.linear("router", number, layer.router)
            shared = [(SHARED_EXPERT, layer.shared)] if layer.shared is not None else []
            builder.ffn("experts", number, [*shared, *enumerate(layer.experts)], routed=True)
    builder.linear("head", -1, weights.head)
    return tuple(builder.modules)


class _Builder:
    def __init__(self) -> None:
        self.modules: list[Module] = []

    def linear(self, kind: str, layer: int, matrix: Matrix) -> None:
        self._add(kind, layer, [("linear", SHARED_EXPERT, matrix)], routed=False)

    def ffn(self, kind: str, layer: int, experts: Sequence[tuple[int, FFNWeights]], *, routed: bool) -> None:
        parts = []
        for number, expert in experts:
            parts += [("gate_up", number, expert.gate_up), ("down", number, expert.down)]
        self._add(kind, layer, parts, routed=routed)

    def _add(self, kind: str, layer: int, parts: Sequence[tuple[str, int, Matrix]], *, routed: bool) -> None:
        index = len(self.modules)
        tiles = tuple(
            Tile(index, role, matrix, start, stop, expert, matrix.extents(start, stop))
            for role, expert, matrix in parts
            for start, stop in cut(matrix)
        )
        self.modules.append(Module(index, kind, layer, tiles, routed, sum(tile.nbytes for tile in tiles)))
