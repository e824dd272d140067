"""Joining the partial attention results of a row's splits, in order. Importing this module imports triton."""

from __future__ import annotations

import triton
import triton.language as tl

from batchgen_lite.kernels.triton_math import LOG2E, MASKED


@triton.jit(do_not_specialize=["tokens", "window"])
def merge_kernel(
    partial,
    tops,
    totals,
    positions,
    sinks,
    out,
    tokens,
    heads,
    value_depth,
    window,
    out_stride,
    out_head_stride,
    WINDOWED: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """out = sum_s 2^(top_s - top) acc_s / sum_s 2^(top_s - top) total_s. Grid (tokens, head tiles).

    Only splits that the row's position and window reach are read, so their number depends on the row alone. A sink is
    a logit that joins the denominator only (gpt-oss).

    Must move: T * Hq * (Dv + 2) fp32 per split, T * Hq * Dv outputs. Bound by memory.
    """
    token = tl.program_id(0).to(tl.int64)
    position = tl.load(positions + token)
    if position < 0:  # a row that belongs to no span
        return
    first = 0
    if WINDOWED:
        first = tl.maximum(position - window + 1, 0) // (64 * SPLIT)
    h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    e = tl.arange(0, BLOCK_V)
    h_ok = h < heads
    mask = h_ok[:, None] & (e < value_depth)[None, :]
    top = tl.full([BLOCK_H], MASKED, dtype=tl.float32)
    total = tl.zeros([BLOCK_H], dtype=tl.float32)
    acc = tl.zeros([BLOCK_H, BLOCK_V], dtype=tl.float32)
    for split in range(first, position // (64 * SPLIT) + 1):
        at = (split * tokens.to(tl.int64) + token) * heads + h
        peak = tl.load(tops + at, mask=h_ok, other=0.0)
        highest = tl.maximum(top, peak)
        keep = tl.exp2(top - highest)
        take = tl.exp2(peak - highest)
        total = total * keep + tl.load(totals + at, mask=h_ok, other=1.0) * take
        part = tl.load(partial + at[:, None] * value_depth + e[None, :], mask=mask, other=0.0)
        acc = acc * keep[:, None] + part * take[:, None]
        top = highest
    if HAS_SINKS:
        sink = tl.load(sinks + h, mask=h_ok, other=0.0).to(tl.float32) * LOG2E
        highest = tl.maximum(top, sink)
        keep = tl.exp2(top - highest)
        total = total * keep + tl.exp2(sink - highest)
        acc = acc * keep[:, None]
    pointer = out + token * out_stride + h[:, None] * out_head_stride + e[None, :]
    tl.store(pointer, (acc / total[:, None]).to(out.dtype.element_ty), mask=mask)
