"""The decoder, as a coroutine over its layers: one slice of a sweep, from embedding to the rows that want logits.

A slice never touches a weight matrix. At every module that has one it yields its hidden states and is resumed with its
rows of the result, computed for all slices at once; what lies between (norms, rotary embedding, attention over its own
sequences' pages) it does itself. So this file is the model, read top to bottom, and knows nothing of streaming.
"""

from __future__ import annotations

import torch

from batchgen_lite.kernels.attention.reference import paged_attention
from batchgen_lite.kernels.norm.reference import rms_norm
from batchgen_lite.kernels.rope.reference import rotate_
from batchgen_lite.models.layers import Layer, Skeleton
from batchgen_lite.models.spec import AttentionSpec, ModelSpec
from batchgen_lite.offload.kv import KVPool
from batchgen_lite.runtime.latent_attention import latent_attention
from batchgen_lite.runtime.primitives import ModuleCall, yield_
from batchgen_lite.runtime.slice_state import Rows, Slice, Steps


def run_slice(spec: ModelSpec, skeleton: Skeleton, part: Slice, rows: Rows, kv: KVPool) -> Steps:
    """One slice through all layers. Yields a ModuleCall per weight-bearing module and is sent its rows of the result;
    the last call is "head", with the final hidden rows that want logits (possibly none). Returns its last result."""
    hidden = rows.hidden[part.start : part.stop]
    normed = rows.normed[part.start : part.stop]
    for layer in skeleton.layers:
        x = _norm(spec, hidden, layer.attention_norm, normed)
        attention = latent_attention if layer.spec.attention.is_mla else _attention
        delta = yield from attention(spec, layer, part, x, rows, kv)
        _add(spec, hidden, delta, layer.attention_norm)
        x = _norm(spec, hidden, layer.ffn_norm, normed)
        kind = "dense" if layer.spec.dense is not None else "experts"
        delta = yield from yield_(ModuleCall(kind, layer.index, x))
        _add(spec, hidden, delta, layer.ffn_norm)
    final = rms_norm(hidden[part.logit_rows], skeleton.final_norm, spec.norm_eps)
    return (yield from yield_(ModuleCall("head", -1, final)))


def _norm(spec: ModelSpec, hidden: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    if spec.norm_placement == "post":
        return out.copy_(hidden)
    return rms_norm(hidden, weight, spec.norm_eps, out)


def _add(spec: ModelSpec, hidden: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor) -> None:
    if spec.norm_placement == "post":
        delta = rms_norm(delta.contiguous(), weight, spec.norm_eps)
    # Scaled in a step of its own: add_ with alpha is fused on some elements only, by where they lie.
    hidden.add_(delta if spec.residual_scale == 1.0 else delta * spec.residual_scale)


def _attention(spec: ModelSpec, layer: Layer, part: Slice, x: torch.Tensor, rows: Rows, kv: KVPool) -> Steps:
    attention = layer.spec.attention
    qkv = yield from yield_(ModuleCall("qkv", layer.index, x))  # [n, (Hq + Hkv) * D + Hkv * Dv]
    query, key, value = _heads(spec, layer, qkv)
    if attention.rope is not None:
        cos, sin = part.rope(attention.rope)
        rotate_(query, cos, sin, attention.rope.interleaved)
        rotate_(key, cos, sin, attention.rope.interleaved)
    kv.write(layer.index, part.pages, part.slots, key, value)
    out = rows.attended[part.start : part.stop, : attention.num_heads * attention.v_head_dim]
    paged_attention(
        query,
        kv.keys[layer.index],
        kv.values[layer.index],
        part.plan(attention.num_heads // attention.num_kv_heads, attention.window),
        scale=attention.scale,
        window=attention.window,
        sinks=layer.sinks,
        scales=kv.scales(layer.index),
        out=out.view(part.stop - part.start, attention.num_heads, attention.v_head_dim),
    )
    delta = yield from yield_(ModuleCall("out", layer.index, out))
    return delta if layer.out_bias is None else delta + layer.out_bias


def _heads(spec: ModelSpec, layer: Layer, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Split fused projections into normed query [n, Hq, D], key [n, Hkv, D] and value [n, Hkv, Dv], contiguous."""
    attention: AttentionSpec = layer.spec.attention
    widths = [
        attention.num_heads * attention.head_dim,
        attention.num_kv_heads * attention.head_dim,
        attention.num_kv_heads * attention.v_head_dim,
    ]
    query, key, value = (part.contiguous() for part in torch.split(qkv, widths, dim=1))
    bias = layer.projection_bias.get("qkv")
    if bias is not None:
        for tensor, part in zip((query, key, value), torch.split(bias, widths), strict=True):
            tensor.add_(part)
    if attention.qk_norm == "full":
        query, key = (rms_norm(t, w, spec.norm_eps) for t, w in ((query, layer.q_norm), (key, layer.k_norm)))  # type: ignore[arg-type]
    query = query.view(-1, attention.num_heads, attention.head_dim)
    key = key.view(-1, attention.num_kv_heads, attention.head_dim)
    if attention.qk_norm == "head":
        query, key = (rms_norm(t, w, spec.norm_eps) for t, w in ((query, layer.q_norm), (key, layer.k_norm)))  # type: ignore[arg-type]
    return query, key, value.view(-1, attention.num_kv_heads, attention.v_head_dim)
