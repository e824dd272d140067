"""A model's weight-bearing steps in the order in which a sweep needs them."""

from __future__ import annotations

from collections.abc import Sequence

from batchgen_lite.models.spec import AttentionSpec, ModelSpec
from batchgen_lite.models.weights import FFNWeights, GQAWeights, MLAWeights, ModelWeights
from batchgen_lite.offload.checkpoint.head_rows import HeadRows
from batchgen_lite.offload.checkpoint.matrix import Matrix
from batchgen_lite.offload.tiles import SHARED_EXPERT, Module, Tile, cut


def modules_of(spec: ModelSpec, weights: ModelWeights) -> tuple[Module, ...]:
    """Every streamed module in the order in which a sweep needs it. Vectors and norms are not streamed."""
    builder = _Builder()
    for number, layer in enumerate(weights.layers):
        attention = layer.attention
        if isinstance(attention, GQAWeights):
            builder.linear("qkv", number, attention.qkv)
        else:
            builder.latent(number, attention, spec.layers[number].attention)
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

    def latent(self, layer: int, weights: MLAWeights, spec: AttentionSpec) -> None:
        """MLA's projections; kv_b as two modules, its key rows (used before attention) and value rows (after it)."""
        for kind in ("q", "q_a", "q_b", "kv_a"):
            matrix = getattr(weights, kind)
            if matrix is not None:
                self.linear(kind, layer, matrix)
        assert spec.rope_head_dim is not None
        nope = spec.head_dim - spec.rope_head_dim
        group = nope + spec.v_head_dim
        self.linear("absorb_k", layer, HeadRows(weights.kv_b, group, 0, nope))
        self.linear("absorb_v", layer, HeadRows(weights.kv_b, group, nope, spec.v_head_dim))

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
