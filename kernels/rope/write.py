"""From the fused q/k/v projection to rotated queries and a filled KV cache, in one launch.

Per token: q and k are normalised (per head or over all heads, where the model does so), rotated (Su et al. 2021), and k
and v go straight to their places in the KV pages. Importing this module imports triton.
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

PAGE = 64  # positions in a page


@triton.jit
def rotated(
    row, heads, channels, mask, head_stride, weight, weight_head, cos, sin, inverse, rotary_from,
    ROTARY: tl.constexpr, INTERLEAVED: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Norm and rotation of the heads at ``row``: fp32 [heads, channels].

    ``cos``, ``sin``: pointers to the token's ROTARY / 2 values; channels [rotary_from, rotary_from + ROTARY) turn, the
    others pass through. ``inverse`` [heads, 1]: the norm's factor. A channel's partner is loaded a second time rather
    than shuffled between threads: it comes from the cache.
    """
    value = tl.load(row + heads[:, None] * head_stride + channels[None, :], mask=mask, other=0.0).to(tl.float32)
    if ROTARY == 0:
        if NORM:
            pointer = weight + heads[:, None] * weight_head + channels[None, :]
            value = value * inverse * tl.load(pointer, mask=mask, other=0.0).to(tl.float32)
        return value
    at = channels - rotary_from
    turns = (at >= 0) & (at < ROTARY)
    if INTERLEAVED:
        partner = tl.where(at % 2 == 0, channels + 1, channels - 1)
        index = at // 2
        sign = tl.where(at % 2 == 0, -1.0, 1.0)
    else:
        partner = tl.where(at < ROTARY // 2, channels + ROTARY // 2, channels - ROTARY // 2)
        index = at % (ROTARY // 2)
        sign = tl.where(at < ROTARY // 2, -1.0, 1.0)
    partner = tl.where(turns, partner, channels)
    other = tl.load(row + heads[:, None] * head_stride + partner[None, :], mask=mask, other=0.0).to(tl.float32)
    if NORM:
        at_weight = weight + heads[:, None] * weight_head
        value = value * inverse * tl.load(at_weight + channels[None, :], mask=mask, other=0.0).to(tl.float32)
        other = other * inverse * tl.load(at_weight + partner[None, :], mask=mask, other=0.0).to(tl.float32)
    c = tl.load(cos + index, mask=turns, other=1.0)
    s = tl.load(sin + index, mask=turns, other=0.0)
    return value * c[None, :] + other * (sign * s)[None, :]


@triton.jit
def rope_write_kernel(
    qkv,
    q_weight,
    k_weight,
    cos,
    sin,
    slots,
    q_out,
    keys,
    values,
    eps,
    q_heads,
    kv_heads,
    depth,
    value_depth,
    rotary_from,
    qkv_stride,
    cos_stride,
    q_token_stride,
    q_head_stride,
    key_page_stride,
    key_head_stride,
    key_stride,
    value_page_stride,
    value_head_stride,
    value_stride,
    ROTARY: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    NORM: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Grid (tokens, 3): queries, keys, values of one token. NORM: 0 none, 1 per head, 2 over all heads.

    Must move: T * (Hq * D + Hkv * D + Hkv * Dv) elements in and the same out. Must do: ~10 operations an element. Bound
    by memory.
    """
    token = tl.program_id(0).to(tl.int64)
    what = tl.program_id(1)
    row = qkv + token * qkv_stride
    cos += token * cos_stride
    sin += token * cos_stride
    if what == 0:
        target = q_out + token * q_token_stride
        _turn_heads(
            row, target, q_head_stride, q_weight, cos, sin, eps, q_heads, depth, rotary_from,
            ROTARY, INTERLEAVED, NORM, BLOCK_Q, BLOCK_D,
        )  # fmt: skip
    else:
        slot = tl.load(slots + token)
        if what == 1:
            _turn_heads(
                row + q_heads * depth, keys + slot // 64 * key_page_stride + slot % 64 * key_stride, key_head_stride,
                k_weight, cos, sin, eps, kv_heads, depth, rotary_from,
                ROTARY, INTERLEAVED, NORM, BLOCK_KV, BLOCK_D,
            )  # fmt: skip
        else:
            _copy_heads(
                row + (q_heads + kv_heads) * depth, values + slot // 64 * value_page_stride + slot % 64 * value_stride,
                value_head_stride, kv_heads, value_depth, BLOCK_KV, BLOCK_V,
            )  # fmt: skip


@triton.jit
def _turn_heads(
    row, target, target_stride, weight, cos, sin, eps, heads, depth, rotary_from,
    ROTARY: tl.constexpr, INTERLEAVED: tl.constexpr, NORM: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """All query or key heads of a token, normalised and rotated, to ``target``."""
    h = tl.arange(0, BLOCK_H)
    d = tl.arange(0, BLOCK_D)
    mask = (h < heads)[:, None] & (d < depth)[None, :]
    inverse = _inverse_rms(row, h, d, mask, depth, heads, eps, NORM)
    result = rotated(
        row, h, d, mask, depth, weight, 0 if NORM == 1 else depth, cos, sin, inverse, rotary_from,
        ROTARY, INTERLEAVED, NORM > 0,
    )  # fmt: skip
    pointer = target + h[:, None] * target_stride + d[None, :]
    tl.store(pointer, result.to(target.dtype.element_ty), mask=mask)


@triton.jit
def _copy_heads(row, target, target_stride, heads, depth, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr):
    h = tl.arange(0, BLOCK_H)
    d = tl.arange(0, BLOCK_D)
    mask = (h < heads)[:, None] & (d < depth)[None, :]
    value = tl.load(row + h[:, None] * depth + d[None, :], mask=mask, other=0.0).to(tl.float32)
    tl.store(target + h[:, None] * target_stride + d[None, :], value.to(target.dtype.element_ty), mask=mask)


@triton.jit
def _inverse_rms(row, heads, channels, mask, depth, num_heads, eps, NORM: tl.constexpr):
    """1 / sqrt(mean square + eps): [heads, 1], per head (1) or over all heads (2); of no meaning for 0."""
    if NORM == 0:
        return heads[:, None].to(tl.float32)
    else:
        value = tl.load(row + heads[:, None] * depth + channels[None, :], mask=mask, other=0.0).to(tl.float32)
        squares = tl.sum(value * value, 1)  # [heads]
        if NORM == 2:
            squares = tl.sum(squares, 0) / num_heads + heads.to(tl.float32) * 0.0
        return (1.0 / tl.sqrt_rn(squares / depth + eps))[:, None]


def rope_write(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    slots: torch.Tensor,
    q_out: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    rotary_from: int = 0,
    interleaved: bool = False,
    q_weight: torch.Tensor | None = None,
    k_weight: torch.Tensor | None = None,
    eps: float = 0.0,
    config: Config | None = None,
) -> Launch:
    """Prepare the launch; ``.run()`` queues it.

    ``qkv`` [T, Hq*D + Hkv*D + Hkv*Dv]: all q heads, then k, then v; ``cos``, ``sin`` fp32 [T, rotary / 2], the tables
    of each token's position with their attention scaling applied; rotary 0 = no rotation; ``slots`` int64 [T]: page *
    64 + place within the page, where the token's k and v belong; ``q_out`` [T, Hq, D]; ``keys`` [P, Hkv, 64, D] and
    ``values`` [P, Hkv, 64, Dv]: page pools of a layer, any strides but the last. ``q_weight``, ``k_weight``: None, [D]
    (norm per head) or [Hq*D] and [Hkv*D] (norm over all heads). Raises OperandError.
    """
    device = qkv.device
    require("q_out", q_out, (None, None, None), FLOATS, device)
    tokens, q_heads, depth = q_out.shape
    require("keys", keys, (None, None, PAGE, depth), FLOATS, device)
    require("values", values, (keys.shape[0], keys.shape[1], PAGE, None), FLOATS, device)
    kv_heads, value_depth = keys.shape[1], values.shape[3]
    require("qkv", qkv, (tokens, (q_heads + kv_heads) * depth + kv_heads * value_depth), FLOATS, device)
    require("cos", cos, (tokens, None), torch.float32, device)
    require("sin", sin, tuple(cos.shape), torch.float32, device)
    require("slots", slots, (tokens,), torch.int64, device)
    rotary = 2 * cos.shape[1]
    if rotary_from < 0 or rotary_from + rotary > depth or cos.stride(0) != sin.stride(0):
        raise OperandError(
            f"cos: {rotary} channels from {rotary_from} on do not lie in a head of {depth}; check the rope"
        )
    for name, output in (("q_out", q_out), ("keys", keys), ("values", values)):
        require_disjoint(name, output, {"qkv": qkv})
    norm = _norm_kind(q_weight, k_weight, q_heads, kv_heads, depth, device)
    config = config or lookup("rope_write", capability=capability_of(device), dtype=dtype_name(qkv.dtype), n=depth)
    arguments = {
        "qkv": qkv,
        "q_weight": q_weight,
        "k_weight": k_weight,
        "cos": cos,
        "sin": sin,
        "slots": slots,
        "q_out": q_out,
        "keys": keys,
        "values": values,
        "eps": float(eps),
        "q_heads": q_heads,
        "kv_heads": kv_heads,
        "depth": depth,
        "value_depth": value_depth,
        "rotary_from": rotary_from,
        "qkv_stride": qkv.stride(0),
        "cos_stride": cos.stride(0),
        "q_token_stride": q_out.stride(0),
        "q_head_stride": q_out.stride(1),
        "key_page_stride": keys.stride(0),
        "key_head_stride": keys.stride(1),
        "key_stride": keys.stride(2),
        "value_page_stride": values.stride(0),
        "value_head_stride": values.stride(1),
        "value_stride": values.stride(2),
        "ROTARY": rotary,
        "INTERLEAVED": interleaved,
        "NORM": norm,
        "BLOCK_Q": power_of_two(q_heads),
        "BLOCK_KV": power_of_two(kv_heads),
        "BLOCK_D": power_of_two(depth),
        "BLOCK_V": power_of_two(value_depth),
    }
    return Launch(rope_write_kernel, (tokens, 3), arguments, config.num_warps, config.num_stages)


def _norm_kind(
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    q_heads: int,
    kv_heads: int,
    depth: int,
    device: torch.device,
) -> int:
    """0 none, 1 per head, 2 over all heads, told by the weights' lengths."""
    if q_weight is None and k_weight is None:
        return 0
    if q_weight is None or k_weight is None:
        raise OperandError("q_weight and k_weight: one is missing; q and k are normalised alike")
    per_head = q_weight.numel() == depth and k_weight.numel() == depth
    require("q_weight", q_weight, (depth if per_head else q_heads * depth,), FLOATS, device)
    require("k_weight", k_weight, (depth if per_head else kv_heads * depth,), FLOATS, device)
    return 1 if per_head else 2
