"""The small weights of every layer as fp32 tensors: norms, biases, sinks. They stay in memory; matrices stream."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from batchgen_lite.models.load import LoadedModel
from batchgen_lite.models.spec import LayerSpec
from batchgen_lite.models.weights import FFNWeights, GQAWeights, LayerWeights, MLAWeights
from batchgen_lite.offload.checkpoint.dense import read_dense
from batchgen_lite.offload.checkpoint.matrix import Matrix
from batchgen_lite.offload.checkpoint.tensors import Checkpoint

Bias = torch.Tensor | None


@dataclass(frozen=True, slots=True)
class FFNBiases:
    """Biases of one expert or dense FFN: gate_up [2 * I] (gate first) and down [hidden]."""

    gate_up: Bias
    down: Bias


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer's spec and resident vectors, all fp32. ``ffns``: biases by expert number, -1 = shared or dense."""

    index: int
    spec: LayerSpec
    attention_norm: torch.Tensor
    ffn_norm: torch.Tensor
    projection_bias: dict[str, torch.Tensor]  # by module kind: qkv, q, q_a, kv_a
    out_bias: Bias
    q_norm: Bias
    k_norm: Bias
    latent_norms: dict[str, torch.Tensor]  # q_a, kv_a
    sinks: Bias
    router_bias: Bias
    correction_bias: Bias
    shared_gate: Bias
    ffns: dict[int, FFNBiases]


@dataclass(frozen=True, slots=True)
class Skeleton:
    """Everything of a model that is small enough to be resident always."""

    layers: tuple[Layer, ...]
    final_norm: torch.Tensor
    head_bias: Bias
    nbytes: int


def load_skeleton(model: LoadedModel) -> Skeleton:
    """Read all vectors. A few MB for any model; raises CheckpointError or StorageError."""
    reader = _Vectors(model.checkpoint)
    layers = tuple(
        _layer(index, spec, weights, reader)
        for index, (spec, weights) in enumerate(zip(model.spec.layers, model.weights.layers, strict=True))
    )
    final_norm = reader.need(model.weights.final_norm)
    head_bias = reader.read(model.weights.head_bias)
    return Skeleton(layers, final_norm, head_bias, reader.nbytes)


class _Vectors:
    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self.nbytes = 0

    def need(self, matrix: Matrix) -> torch.Tensor:
        vector = read_dense(self.checkpoint, matrix).flatten()
        self.nbytes += vector.nbytes
        return vector

    def read(self, matrix: Matrix | None) -> Bias:
        return None if matrix is None else self.need(matrix)


def _layer(index: int, spec: LayerSpec, weights: LayerWeights, reader: _Vectors) -> Layer:
    attention = weights.attention
    projection_bias: dict[str, torch.Tensor] = {}
    latent_norms: dict[str, torch.Tensor] = {}
    q_norm = k_norm = sinks = None
    if isinstance(attention, GQAWeights):
        _keep(projection_bias, "qkv", reader.read(attention.qkv_bias))
        q_norm, k_norm = reader.read(attention.q_norm), reader.read(attention.k_norm)
        sinks = reader.read(attention.sinks)
    elif isinstance(attention, MLAWeights):
        _keep(projection_bias, "q_a" if attention.q_a is not None else "q", reader.read(attention.q_bias))
        _keep(projection_bias, "kv_a", reader.read(attention.kv_a_bias))
        _keep(latent_norms, "q_a", reader.read(attention.q_a_norm))
        _keep(latent_norms, "kv_a", reader.read(attention.kv_a_norm))
    return Layer(
        index=index,
        spec=spec,
        attention_norm=reader.need(weights.attention_norm),
        ffn_norm=reader.need(weights.ffn_norm),
        projection_bias=projection_bias,
        out_bias=reader.read(attention.out_bias),
        q_norm=q_norm,
        k_norm=k_norm,
        latent_norms=latent_norms,
        sinks=sinks,
        router_bias=reader.read(weights.router_bias),
        correction_bias=reader.read(weights.correction_bias),
        shared_gate=reader.read(weights.shared_gate),
        ffns=_ffns(weights, reader),
    )


def _ffns(weights: LayerWeights, reader: _Vectors) -> dict[int, FFNBiases]:
    ffns: list[tuple[int, FFNWeights]] = list(enumerate(weights.experts))
    ffns += [(-1, ffn) for ffn in (weights.dense, weights.shared) if ffn is not None]
    return {number: FFNBiases(reader.read(ffn.gate_up_bias), reader.read(ffn.down_bias)) for number, ffn in ffns}


def _keep(into: dict[str, torch.Tensor], key: str, value: Bias) -> None:
    if value is not None:
        into[key] = value
