"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1) with absorbed projections, within a slice.

What is cached per position is the latent c [rank] and one rotary key shared by all heads [rope]. With

    score(h) = q_nope(h) . W_k(h) c + q_rope(h) . k_rope    and    out(h) = sum p W_v(h) c

W_k moves to the query's side and W_v behind the sum, so attention is that of one KV head of rank + rope channels whose
value is the first rank of them. All positions, prompt or decode, take this one path.
"""

from __future__ import annotations

import torch

from batchgen_lite.kernels.attention.reference import paged_attention
from batchgen_lite.kernels.norm.reference import rms_norm
from batchgen_lite.kernels.rope.reference import rotate_
from batchgen_lite.models.layers import Layer
from batchgen_lite.models.spec import ModelSpec
from batchgen_lite.offload.kv import KVPool
from batchgen_lite.runtime.primitives import ModuleCall, yield_
from batchgen_lite.runtime.slice_state import Rows, Slice, Steps


def latent_attention(spec: ModelSpec, layer: Layer, part: Slice, x: torch.Tensor, rows: Rows, kv: KVPool) -> Steps:
    """One layer's attention on ``x`` [n, hidden]; returns its output before the residual add."""
    attention = layer.spec.attention
    rank, rope, heads = attention.kv_lora_rank, attention.rope_head_dim, attention.num_heads
    assert rank is not None
    assert rope is not None
    nope = attention.head_dim - rope
    query = yield from _query(layer, x)
    query = query.reshape(-1, heads, attention.head_dim)
    latent = yield from yield_(ModuleCall("kv_a", layer.index, x))  # [n, rank + rope]
    latent = latent.contiguous()
    if "kv_a" in layer.projection_bias:
        latent.add_(layer.projection_bias["kv_a"])
    compressed = rms_norm(latent[:, :rank].contiguous(), layer.latent_norms["kv_a"], attention.latent_norm_eps)
    shared = latent[:, None, rank:].contiguous()  # [n, 1, rope]
    rotary = query[:, :, nope:].contiguous()  # [n, Hq, rope]
    if attention.rope is not None:
        cos, sin = part.rope(attention.rope)
        rotate_(shared, cos, sin, attention.rope.interleaved)
        rotate_(rotary, cos, sin, attention.rope.interleaved)
    key = torch.cat((compressed, shared[:, 0]), dim=1).unsqueeze(1)  # [n, 1, rank + rope]
    kv.write(layer.index, part.pages, part.slots, key, key[..., :0])
    plain = query[:, :, :nope].reshape(-1, heads * nope)
    absorbed = yield from yield_(ModuleCall("absorb_k", layer.index, plain))  # [n, Hq * rank]
    query = torch.cat((absorbed.reshape(-1, heads, rank), rotary), dim=2)
    keys = kv.keys[layer.index]
    summed = query.new_empty(part.stop - part.start, heads, rank)
    paged_attention(
        query,
        keys,
        keys[..., :rank],
        part.plan(heads, attention.window),
        scale=attention.scale,
        window=attention.window,
        scales=kv.scales(layer.index),
        out=summed,
    )
    out = yield from yield_(ModuleCall("absorb_v", layer.index, summed.view(-1, heads * rank)))  # [n, Hq * Dv]
    attended = rows.attended[part.start : part.stop, : out.shape[1]]
    attended.copy_(out)
    delta = yield from yield_(ModuleCall("out", layer.index, attended))
    return delta if layer.out_bias is None else delta + layer.out_bias


def _query(layer: Layer, x: torch.Tensor) -> Steps:
    """All heads' queries [n, Hq * (nope + rope)], through a latent of their own where the model has one."""
    attention = layer.spec.attention
    if attention.q_lora_rank is None:
        query = yield from yield_(ModuleCall("q", layer.index, x))
        return query + layer.projection_bias["q"] if "q" in layer.projection_bias else query.contiguous()
    latent = yield from yield_(ModuleCall("q_a", layer.index, x))
    latent = latent.contiguous()
    if "q_a" in layer.projection_bias:
        latent.add_(layer.projection_bias["q_a"])
    latent = rms_norm(latent, layer.latent_norms["q_a"], attention.latent_norm_eps)
    query = yield from yield_(ModuleCall("q_b", layer.index, latent))
    return query.contiguous()
