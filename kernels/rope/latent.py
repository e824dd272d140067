"""The KV write of latent attention (MLA, DeepSeek-V2 section 2.1): what is cached is one compressed vector a token.

Per token: the latent part of ``kv_a`` is normalised, the shared rotary key rotated, both go to the KV page; the rotary
part of every query head is rotated into its place beside the absorbed query. Importing this module imports triton.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from batchgen_lite.kernels.config import Config, lookup
from batchgen_lite.kernels.launch import (
    FLOATS,
    Launch,
    OperandError,
    capability_of,
    dtype_name,
    power_of_two,
    require,
    require_disjoint,
)
from batchgen_lite.kernels.rope.write import PAGE, rotated


@triton.jit
def latent_write_kernel(
    kv,
    q,
    weight,
    cos,
    sin,
    slots,
    q_out,
    keys,
    eps,
    heads,
    rank,
    kv_stride,
    cos_stride,
    q_token_stride,
    q_head_stride,
    out_token_stride,
    out_head_stride,
    page_stride,
    key_stride,
    ROTARY: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """Grid (tokens, 2): the queries' rotary parts; latent and rotary key.

    Must move: T * (2 * (rank + rope) + 2 * Hq * rope) elements. Must do: ~10 operations an element. Bound by memory.
    """
    token = tl.program_id(0).to(tl.int64)
    cos += token * cos_stride
    sin += token * cos_stride
    p = tl.arange(0, BLOCK_P)
    if tl.program_id(1) == 0:
        h = tl.arange(0, BLOCK_H)
        mask = (h < heads)[:, None] & (p < ROTARY)[None, :]
        result = rotated(
            q + token * q_token_stride, h, p, mask, q_head_stride, weight, 0, cos, sin, h[:, None], 0,
            ROTARY, INTERLEAVED, False,
        )  # fmt: skip
        pointer = q_out + token * out_token_stride + h[:, None] * out_head_stride + p[None, :]
        tl.store(pointer, result.to(q_out.dtype.element_ty), mask=mask)
    else:
        slot = tl.load(slots + token)
        target = keys + slot // 64 * page_stride + slot % 64 * key_stride
        row = kv + token * kv_stride
        r = tl.arange(0, BLOCK_R)
        value = tl.load(row + r, mask=r < rank, other=0.0).to(tl.float32)
        scale = 1.0 / tl.sqrt_rn(tl.sum(value * value, 0) / rank + eps)
        value = value * scale * tl.load(weight + r, mask=r < rank, other=0.0).to(tl.float32)
        tl.store(target + r, value.to(keys.dtype.element_ty), mask=r < rank)
        zero = tl.arange(0, 1)
        wide = (zero < 1)[:, None] & (p < ROTARY)[None, :]
        key = rotated(
            row + rank, zero, p, wide, 0, weight, 0, cos, sin, zero[:, None], 0, ROTARY, INTERLEAVED, False
        )  # fmt: skip
        tl.store(target + rank + zero[:, None] + p[None, :], key.to(keys.dtype.element_ty), mask=wide)


def latent_write(
    kv: torch.Tensor,
    q_rope: torch.Tensor,
    weight: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    slots: torch.Tensor,
    q_out: torch.Tensor,
    keys: torch.Tensor,
    eps: float,
    *,
    interleaved: bool = False,
    config: Config | None = None,
) -> Launch:
    """Prepare the launch; ``.run()`` queues it.

    ``kv`` [T, rank + rope]: the output of ``kv_a``; ``q_rope`` [T, Hq, rope]: the rotary channels of the queries, a
    view; ``weight`` [rank]: of the latent's norm; ``cos``, ``sin`` fp32 [T, rope / 2]; ``slots`` int64 [T]: page * 64
    + place; ``q_out`` [T, Hq, rope]: where the rotated part goes, usually the view [..., rank:] of the absorbed query;
    ``keys`` [P, 1, 64, rank + rope]. Raises OperandError.
    """
    device = kv.device
    require("q_rope", q_rope, (None, None, None), FLOATS, device)
    tokens, heads, rope = q_rope.shape
    require("weight", weight, (None,), FLOATS, device)
    rank = weight.shape[0]
    require("kv", kv, (tokens, rank + rope), FLOATS, device)
    require("q_out", q_out, (tokens, heads, rope), FLOATS, device)
    require("keys", keys, (None, 1, PAGE, rank + rope), FLOATS, device)
    require("cos", cos, (tokens, rope // 2), torch.float32, device)
    require("sin", sin, (tokens, rope // 2), torch.float32, device)
    require("slots", slots, (tokens,), torch.int64, device)
    require_disjoint("q_out", q_out, {"q_rope": q_rope, "kv": kv})
    require_disjoint("keys", keys, {"kv": kv})
    if cos.stride(0) != sin.stride(0):
        raise OperandError(f"cos and sin: strides {cos.stride(0)} and {sin.stride(0)} differ; store both tables alike")
    config = config or lookup("latent_write", capability=capability_of(device), dtype=dtype_name(kv.dtype), n=rank)
    arguments = {
        "kv": kv,
        "q": q_rope,
        "weight": weight,
        "cos": cos,
        "sin": sin,
        "slots": slots,
        "q_out": q_out,
        "keys": keys,
        "eps": float(eps),
        "heads": heads,
        "rank": rank,
        "kv_stride": kv.stride(0),
        "cos_stride": cos.stride(0),
        "q_token_stride": q_rope.stride(0),
        "q_head_stride": q_rope.stride(1),
        "out_token_stride": q_out.stride(0),
        "out_head_stride": q_out.stride(1),
        "page_stride": keys.stride(0),
        "key_stride": keys.stride(2),
        "ROTARY": rope,
        "INTERLEAVED": interleaved,
        "BLOCK_H": power_of_two(heads),
        "BLOCK_R": power_of_two(rank),
        "BLOCK_P": power_of_two(rope),
    }
    return Launch(latent_write_kernel, (tokens, 2), arguments, config.num_warps, config.num_stages)
