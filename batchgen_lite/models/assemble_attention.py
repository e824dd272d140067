"""Attention weights of one layer: fused qkv of GQA, the latent projections of MLA."""

from __future__ import annotations

from collections.abc import Sequence

from batchgen_lite.models.spec import AttentionSpec
from batchgen_lite.models.tensor_names import Names, TensorNames
from batchgen_lite.models.tensor_source import TensorSource
from batchgen_lite.models.weights import GQAWeights, MLAWeights
from batchgen_lite.offload.checkpoint.matrices import (
    ConcatMatrix,
    HeadPermutedMatrix,
    HeadPermutedVector,
    JoinedVector,
)
from batchgen_lite.offload.checkpoint.matrix import Matrix


class _Layer:
    """One layer's view of the source: roles in, matrices out."""

    def __init__(self, source: TensorSource, index: int) -> None:
        self.source = source
        self.index = index

    def full(self, role: Names, suffix: str = ".weight") -> list[str]:
        return [name.format(i=self.index) + suffix for name in role]

    def linear(self, role: Names, rows: int, cols: int) -> Matrix:
        return self.source.linear(self.full(role, ""), rows, cols)

    def vector(self, role: Names, length: int, suffix: str = ".weight") -> Matrix:
        return self.source.vector(self.full(role, suffix), length)

    def bias(self, role: Names, length: int) -> Matrix:
        return self.vector(role, length, ".bias")


def attention_weights(
    spec: AttentionSpec, names: TensorNames, source: TensorSource, index: int, hidden: int, *, llama_gguf: bool
) -> GQAWeights | MLAWeights:
    """``llama_gguf``: q and k rows were permuted by llama.cpp's converter and are put back."""
    layer = _Layer(source, index)
    if spec.is_mla:
        return _mla(spec, names, layer, hidden)
    return _gqa(spec, names, layer, hidden, llama_gguf)


def _gqa(spec: AttentionSpec, names: TensorNames, layer: _Layer, hidden: int, llama_gguf: bool) -> GQAWeights:
    q_rows, k_rows = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    v_rows = spec.num_kv_heads * spec.v_head_dim
    q, k = layer.linear(names.q, q_rows, hidden), layer.linear(names.k, k_rows, hidden)
    if llama_gguf:
        q, k = HeadPermutedMatrix(q, spec.head_dim), HeadPermutedMatrix(k, spec.head_dim)
    qkv_bias: Matrix | None = None
    if spec.qkv_bias:
        q_bias, k_bias = layer.bias(names.q, q_rows), layer.bias(names.k, k_rows)
        if llama_gguf:
            q_bias, k_bias = HeadPermutedVector(q_bias, spec.head_dim), HeadPermutedVector(k_bias, spec.head_dim)
        qkv_bias = JoinedVector([q_bias, k_bias, layer.bias(names.v, v_rows)])
    q_norm = k_norm = None
    if spec.qk_norm is not None:
        q_norm = layer.vector(names.q_norm, spec.head_dim if spec.qk_norm == "head" else q_rows)
        k_norm = layer.vector(names.k_norm, spec.head_dim if spec.qk_norm == "head" else k_rows)
    return GQAWeights(
        qkv=ConcatMatrix([q, k, layer.linear(names.v, v_rows, hidden)]),
        out=layer.linear(names.out, hidden, spec.num_heads * spec.v_head_dim),
        qkv_bias=qkv_bias,
        out_bias=layer.bias(names.out, hidden) if spec.out_bias else None,
        q_norm=q_norm,
        k_norm=k_norm,
        sinks=_sinks(spec, names, layer) if spec.sinks else None,
    )


def _sinks(spec: AttentionSpec, names: TensorNames, layer: _Layer) -> Matrix:
    suffix = "" if layer.source.has(layer.full(names.sinks, "")) else ".weight"
    return layer.vector(names.sinks, spec.num_heads, suffix)


def _mla(spec: AttentionSpec, names: TensorNames, layer: _Layer, hidden: int) -> MLAWeights:
    rank, rope = spec.kv_lora_rank or 0, spec.rope_head_dim or 0
    q_rows = spec.num_heads * spec.head_dim
    q = q_a = q_a_norm = q_b = q_bias = None
    if spec.q_lora_rank is None:
        q = layer.linear(names.q, q_rows, hidden)
    else:
        q_a = layer.linear(names.q_a, spec.q_lora_rank, hidden)
        q_a_norm = layer.vector(names.q_a_norm, spec.q_lora_rank)
        q_b = layer.linear(names.q_b, q_rows, spec.q_lora_rank)
        q_bias = layer.bias(names.q_a, spec.q_lora_rank) if spec.qkv_bias else None
    return MLAWeights(
        kv_a=layer.linear(names.kv_a, rank + rope, hidden),
        kv_a_norm=layer.vector(names.kv_a_norm, rank),
        kv_b=_kv_b(spec, names, layer),
        out=layer.linear(names.out, hidden, spec.num_heads * spec.v_head_dim),
        q=q,
        q_a=q_a,
        q_a_norm=q_a_norm,
        q_b=q_b,
        q_bias=q_bias,
        kv_a_bias=layer.bias(names.kv_a, rank + rope) if spec.qkv_bias else None,
        out_bias=layer.bias(names.out, hidden) if spec.out_bias else None,
    )


def _kv_b(spec: AttentionSpec, names: TensorNames, layer: _Layer) -> Matrix:
    """Per head the rows of the keys, then of the values; newer GGUF files store the two apart."""
    rank, heads = spec.kv_lora_rank or 0, spec.num_heads
    nope = spec.head_dim - (spec.rope_head_dim or 0)
    if layer.source.has(layer.full(names.k_b)):
        layer.source.ignore(layer.full(names.kv_b))  # some writers stored both forms
        parts: Sequence[Matrix] = [
            half
            for head in range(heads)
            for half in (
                layer.source.stacked_transposed(layer.full(names.k_b), (heads, rank, nope), head),
                layer.source.stacked(layer.full(names.v_b), (heads, spec.v_head_dim, rank), head),
            )
        ]
        return ConcatMatrix(list(parts))
    return layer.linear(names.kv_b, heads * (nope + spec.v_head_dim), rank)
