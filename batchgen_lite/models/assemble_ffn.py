"""Feed-forward weights of one layer: dense, shared, and routed experts in each way checkpoints store them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from batchgen_lite.errors import CheckpointError
from batchgen_lite.models.spec import FFNSpec, LayerSpec, RouterSpec
from batchgen_lite.models.tensor_names import Names, TensorNames
from batchgen_lite.models.tensor_source import TensorSource
from batchgen_lite.models.weights import FFNWeights
from batchgen_lite.offload.checkpoint.matrices import (
    DeinterleavedVector,
    InterleavedPair,
    JoinedVector,
    PairMatrix,
    SplitPair,
)
from batchgen_lite.offload.checkpoint.matrix import Matrix


@dataclass(frozen=True, slots=True)
class RoutedWeights:
    """What a MoE layer has beside its shared expert; see LayerWeights."""

    router: Matrix
    router_bias: Matrix | None
    correction_bias: Matrix | None
    experts: tuple[FFNWeights, ...]


def dense_weights(spec: FFNSpec, names: TensorNames, source: TensorSource, index: int, hidden: int) -> FFNWeights:
    """A dense FFN, gate and up stored apart."""
    return _separate(spec, names.gate, names.up, names.down, source, hidden, lambda name: name.format(i=index))


def shared_weights(
    layer: LayerSpec, names: TensorNames, source: TensorSource, index: int, hidden: int
) -> tuple[FFNWeights | None, Matrix | None]:
    """The shared expert and its gate [1, hidden], each None where the layer has none."""
    spec = layer.shared
    if spec is None:
        return None, None

    def place(name: str) -> str:
        return name.format(i=index)

    if names.shared_gate_up and source.has_linear([place(name) for name in names.shared_gate_up]):
        fused = [place(name) for name in names.shared_gate_up]
        down = source.linear([place(name) for name in names.shared_down], hidden, spec.intermediate)
        ffn = FFNWeights(gate_up=source.halves(fused, spec.intermediate, hidden), down=down)
    else:
        ffn = _separate(spec, names.shared_gate, names.shared_up, names.shared_down, source, hidden, place)
    gate = None
    if layer.shared_gated:
        gate = source.linear([place(name) for name in names.shared_expert_gate], 1, hidden)
    return ffn, gate


def expert_weights(
    layer: LayerSpec, names: TensorNames, source: TensorSource, index: int, hidden: int
) -> RoutedWeights:
    """Router and experts of a MoE layer."""
    router, expert = layer.router, layer.expert
    if router is None or expert is None:
        raise CheckpointError(f"layer {index} has neither a dense FFN nor experts; the configuration is inconsistent.")
    count = router.num_experts

    def place(role: Names, suffix: str = "") -> list[str]:
        return [name.format(i=index, e="{e}") + suffix for name in role]

    return RoutedWeights(
        router=source.linear(place(names.router), count, hidden),
        router_bias=source.vector(place(names.router_bias), count) if router.bias else None,
        correction_bias=source.vector(place(names.correction_bias), count) if router.correction_bias else None,
        experts=_experts(router, expert, names, source, hidden, place),
    )


def _experts(
    router: RouterSpec,
    spec: FFNSpec,
    names: TensorNames,
    source: TensorSource,
    hidden: int,
    place: Callable[..., list[str]],
) -> tuple[FFNWeights, ...]:
    build: Callable[[int], FFNWeights]
    gate_up, gate = place(names.stacked_gate_up), place(names.stacked_gate, ".weight")
    packed = place(names.packed_expert)
    if source.has([name.format(e=0) for name in packed], "gate_up"):
        build = _Packed(spec, source, hidden, packed[0]).expert
    elif spec.activation == "swigluoai" and gate_up:
        build = _Interleaved(router.num_experts, spec, source, hidden, gate_up, place(names.stacked_down)).expert
    elif source.has(gate_up) or source.has_linear(gate_up):
        build = _Fused(router.num_experts, spec, source, hidden, gate_up, place(names.stacked_down)).expert
    elif source.has(gate):
        stacks = gate, place(names.stacked_up, ".weight"), place(names.stacked_down, ".weight")
        build = _Stacked(router.num_experts, spec, source, hidden, *stacks).expert
    else:
        roles = names.expert_gate, names.expert_up, names.expert_down
        gates, ups, downs = (tuple(place(role)) for role in roles)

        def build(expert: int) -> FFNWeights:
            return _separate(spec, gates, ups, downs, source, hidden, lambda name: name.format(e=expert))

    return tuple(build(expert) for expert in range(router.num_experts))


def _separate(
    spec: FFNSpec,
    gate: Names,
    up: Names,
    down: Names,
    source: TensorSource,
    hidden: int,
    place: Callable[[str], str],
) -> FFNWeights:
    """gate [I, H], up [I, H] and down [H, I], each under a name of its own."""
    gates, ups, downs = ([place(name) for name in role] for role in (gate, up, down))
    width = spec.intermediate
    gate_up_bias = down_bias = None
    if spec.bias:
        parts = [source.vector([name + ".bias" for name in role], width) for role in (gates, ups)]
        gate_up_bias = JoinedVector(parts)
        down_bias = source.vector([name + ".bias" for name in downs], hidden)
    return FFNWeights(
        gate_up=PairMatrix(source.linear(gates, width, hidden), source.linear(ups, width, hidden)),
        down=source.linear(downs, hidden, width),
        gate_up_bias=gate_up_bias,
        down_bias=down_bias,
    )


@dataclass(frozen=True, slots=True)
class _Fused:
    """gate_up [E, 2I, H], gate rows first, and down [E, H, I]: transformers 5, Granite."""

    count: int
    spec: FFNSpec
    source: TensorSource
    hidden: int
    gate_up: list[str]
    down: list[str]

    def expert(self, expert: int) -> FFNWeights:
        width, hidden = self.spec.intermediate, self.hidden
        return FFNWeights(
            gate_up=SplitPair(self.source.stacked_linear(self.gate_up, (self.count, 2 * width, hidden), expert)),
            down=self.source.stacked_linear(self.down, (self.count, hidden, width), expert),
        )


@dataclass(frozen=True, slots=True)
class _Interleaved:
    """gate_up [E, H, 2I], columns gate, up, gate, up, ..., and down [E, I, H], with biases: gpt-oss, plain or MXFP4."""

    count: int
    spec: FFNSpec
    source: TensorSource
    hidden: int
    gate_up: list[str]
    down: list[str]

    def expert(self, expert: int) -> FFNWeights:
        width, hidden, source = self.spec.intermediate, self.hidden, self.source
        gate_up_bias = [name + "_bias" for name in self.gate_up]
        down_bias = [name + "_bias" for name in self.down]
        if source.is_packed(self.gate_up):
            # Packed, the stacks are not transposed: a row of blocks runs along the inputs.
            gate_up = source.stacked_linear(self.gate_up, (self.count, 2 * width, hidden), expert)
            down = source.stacked_linear(self.down, (self.count, hidden, width), expert)
        else:
            gate_up = source.stacked_transposed(self.gate_up, (self.count, hidden, 2 * width), expert)
            down = source.stacked_transposed(self.down, (self.count, width, hidden), expert)
        return FFNWeights(
            gate_up=InterleavedPair(gate_up),
            down=down,
            gate_up_bias=DeinterleavedVector(source.stacked(gate_up_bias, (self.count, 2 * width), expert)),
            down_bias=source.stacked(down_bias, (self.count, hidden), expert),
        )


@dataclass(frozen=True, slots=True)
class _Stacked:
    """gate [E, I, H], up [E, I, H], down [E, H, I], biases [E, I] and [E, H] where the model has them: GGUF."""

    count: int
    spec: FFNSpec
    source: TensorSource
    hidden: int
    gate: list[str]
    up: list[str]
    down: list[str]

    def expert(self, expert: int) -> FFNWeights:
        width, hidden, source = self.spec.intermediate, self.hidden, self.source
        wide, narrow = (self.count, width, hidden), (self.count, hidden, width)
        gate_up_bias = down_bias = None
        if self.spec.bias:
            gate_bias, up_bias, down_names = (
                [name.removesuffix(".weight") + ".bias" for name in names] for names in (self.gate, self.up, self.down)
            )
            halves = [source.stacked(names, (self.count, width), expert) for names in (gate_bias, up_bias)]
            gate_up_bias = JoinedVector(halves)
            down_bias = source.stacked(down_names, (self.count, hidden), expert)
        return FFNWeights(
            gate_up=PairMatrix(source.stacked(self.gate, wide, expert), source.stacked(self.up, wide, expert)),
            down=source.stacked(self.down, narrow, expert),
            gate_up_bias=gate_up_bias,
            down_bias=down_bias,
        )


@dataclass(frozen=True, slots=True)
class _Packed:
    """gate_up [2I, H], gate rows first, and down [H, I] of one expert, biases [2I] and [H]: written by ``pack``."""

    spec: FFNSpec
    source: TensorSource
    hidden: int
    prefix: str

    def expert(self, expert: int) -> FFNWeights:
        width, hidden, source = self.spec.intermediate, self.hidden, self.source
        prefix = self.prefix.format(e=expert)
        gate_up_bias = down_bias = None
        if self.spec.bias:
            gate_up_bias = source.vector([prefix + "gate_up_bias"], 2 * width)
            down_bias = source.vector([prefix + "down_bias"], hidden)
        return FFNWeights(
            gate_up=SplitPair(source.blocks(prefix + "gate_up", (2 * width, hidden))),
            down=source.blocks(prefix + "down", (hidden, width)),
            gate_up_bias=gate_up_bias,
            down_bias=down_bias,
        )
