"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1) with absorbed projections, within a slice.

What is cached per position is the latent c [rank] and one rotary key shared by all heads [rope]. With

    score(h) = q_nope(h) . W_k(h) c + q_rope(h) . k_rope    and    out(h) = sum p W_v(h) c

W_k moves to the query's side and W_v behind the sum, so attention is that of one KV head of rank + rope channels whose
value is the first rank of them. All positions, prompt or decode, take this one path.
"""

from __future__ import annotations

import torch

from batchgen_lite.models.layers import Layer
from batchgen_lite.runtime.operations import SliceOperations
from batchgen_lite.runtime.primitives import ModuleCall, yield_
from batchgen_lite.runtime.slice_state import Steps


def latent_attention(layer: Layer, slice_: SliceOperations, x: torch.Tensor) -> Steps:
    """One layer's attention on ``x`` [n, hidden]: the input of "out"."""
    query = yield from _query(layer, slice_, x)  # [n, Hq * (nope + rope)]
    latent = yield from yield_(ModuleCall("kv_a", layer.index, x))  # [n, rank + rope]
    plain = slice_.latent_heads(layer, query, latent)  # [n, Hq * nope]
    absorbed = yield from yield_(ModuleCall("absorb_k", layer.index, plain))  # [n, Hq * rank]
    summed = slice_.latent_attention(layer, absorbed)  # [n, Hq * rank]
    values = yield from yield_(ModuleCall("absorb_v", layer.index, summed))  # [n, Hq * Dv]
    return slice_.latent_values(layer, values)


def _query(layer: Layer, slice_: SliceOperations, x: torch.Tensor) -> Steps:
    """All heads' queries, through a latent of their own where the model has one."""
    if layer.spec.attention.q_lora_rank is None:
        return (yield from yield_(ModuleCall("q", layer.index, x)))
    latent = yield from yield_(ModuleCall("q_a", layer.index, x))
    return (yield from yield_(ModuleCall("q_b", layer.index, slice_.query_latent(layer, latent))))
