"""Paged attention for spans of any length: partial results per split of pages. Importing this module imports triton.

A span is n consecutive positions of one sequence; a decode step is a span of 1, a prefill chunk one of hundreds, and
both take this one kernel with the same block sizes, so that a token's bits do not depend on which it was. For the same
reason the KV of a sequence is split by pages, at fixed multiples of SPLIT pages from its beginning (as in
Flash-Decoding, Dao et al. 2023, but never by how busy the card is); ``merge.py`` joins the splits in order. Within a
split, pages are visited in order and joined by the online softmax (Milakov & Gimelshein 2018). What a row may not see
contributes exact zeros.

Rows of a tile are (position, query head of one KV head's group) pairs: r -> position r // G, head r % G. Latent
attention is the case of one KV head whose value is the first channels of its key.

int8 KV has a scale per position and head (``quantise.py``, which has to run before): those of the keys join the scores,
those of the values the weights, so that pages are used as they lie.
"""

from __future__ import annotations

import triton
import triton.language as tl

from batchgen_lite.kernels.triton_math import LOG2E, MASKED, dot3

CHUNK: tl.constexpr = tl.constexpr(128)  # channels at a time of a wide query


@triton.jit
def load_rows(base, positions, stride, channels, ok, width):
    """[positions, channels] of a page; 0 outside ``ok`` and beyond ``width``: stale memory may be NaN. int8 as fp32."""
    pointer = base + positions[:, None] * stride + channels[None, :]
    mask = ok[:, None] & (channels < width)[None, :]
    if base.dtype.element_ty == tl.int8:
        return tl.load(pointer, mask=mask, other=0).to(tl.float32)
    else:
        return tl.load(pointer, mask=mask, other=0.0)


@triton.jit
def attend(
    q_row, row_ok, q, key, value, key_scale, value_scale, first_position, last_position, see_from, see_below,
    top, total, acc, key_stride, value_stride, depth, value_depth, score_scale,
    QUANTISED: tl.constexpr, REST: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_T: tl.constexpr,
):  # fmt: skip
    """One step of the online softmax, BLOCK_T positions from ``first_position`` on (``key``, ``value`` point there).

    Row r sees positions j with see_from[r] <= j < see_below[r]; nothing beyond ``last_position`` is read. Scores are
    in units of log 2. ``key_scale``, ``value_scale``: where the positions' scales lie, with QUANTISED. Returns the new
    (top, total, acc).
    """
    t = tl.arange(0, BLOCK_T)
    j = first_position + t
    ok = j <= last_position
    scores = tl.zeros([q.shape[0], BLOCK_T], dtype=tl.float32)
    if BLOCK_D <= 256:
        k = load_rows(key, t, key_stride, tl.arange(0, BLOCK_D), ok, depth)
        scores = dot3(q, tl.trans(k.to(q.dtype)), scores)
    else:
        # Wide queries do not fit into registers: they are read again for every step, from the cache.
        for d0 in range(0, BLOCK_D, CHUNK):
            d = d0 + tl.arange(0, CHUNK)
            k = load_rows(key, t, key_stride, d, ok, depth)
            part = tl.load(q_row[:, None] + d[None, :], mask=row_ok[:, None] & (d < depth)[None, :], other=0.0)
            scores = dot3(part, tl.trans(k.to(q.dtype)), scores)
    if REST > 0:
        e = tl.arange(0, BLOCK_R)
        part = tl.load(q_row[:, None] + depth + e[None, :], mask=row_ok[:, None] & (e < REST)[None, :], other=0.0)
        k = load_rows(key + depth, t, key_stride, e, ok, REST)
        scores = dot3(part, tl.trans(k.to(q.dtype)), scores)
    seen = (j[None, :] >= see_from[:, None]) & (j[None, :] < see_below[:, None])
    if QUANTISED:
        scores = scores * tl.load(key_scale + t, mask=ok, other=0.0)[None, :]
    scores = tl.where(seen, scores * score_scale, MASKED)
    peak = tl.maximum(top, tl.max(scores, 1))
    p = tl.where(seen, tl.exp2(scores - peak[:, None]), 0.0)
    keep = tl.exp2(top - peak)
    total = total * keep + tl.sum(p, 1)
    v = load_rows(value, t, value_stride, tl.arange(0, BLOCK_V), ok, value_depth)
    if QUANTISED:
        p = p * tl.load(value_scale + t, mask=ok, other=0.0)[None, :]
    acc = dot3(p.to(q.dtype), v.to(q.dtype), acc * keep[:, None])
    return peak, total, acc


@triton.jit(do_not_specialize=["window"])
def paged_attention_kernel(
    query,
    keys,
    values,
    key_scales,
    value_scales,
    tiles,
    block_table,
    partial,
    tops,
    totals,
    table_stride,
    query_stride,
    query_head_stride,
    key_page_stride,
    key_head_stride,
    key_stride,
    value_page_stride,
    value_head_stride,
    value_stride,
    scale_page_stride,
    scale_head_stride,
    tokens,
    heads,
    depth,
    value_depth,
    window,
    score_scale,
    GROUP: tl.constexpr,
    QUANTISED: tl.constexpr,
    WINDOWED: tl.constexpr,
    REST: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Grid (tiles, KV heads, splits); programs whose split a tile cannot see leave at once.

    Must move: every page that a tile sees, once per tile and KV head (64 * (D + Dv) elements), the queries, and the
    partial results (Dv + 2 fp32 per row and split). Must do: 2 * rows * positions * (D + Dv) operations. Decoding is
    bound by the KV's bytes, long prefill chunks by operations.
    """
    entry = tiles + tl.program_id(0) * 5
    sequence = tl.load(entry).to(tl.int64)
    start = tl.load(entry + 1)
    first_row = tl.load(entry + 2)
    count = tl.load(entry + 3)
    row0 = tl.load(entry + 4)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    r = row0 + tl.arange(0, BLOCK_M)
    at = r // GROUP  # the row's place in the span
    row_ok = at < count
    position = start + at
    low = start + row0 // GROUP
    high = start + tl.minimum((row0 + BLOCK_M - 1) // GROUP, count - 1)  # the tile's first and last position
    page0 = split * SPLIT
    page_end = tl.minimum(page0 + SPLIT, high // 64 + 1)
    see_from = position * 0
    if WINDOWED:
        see_from = tl.maximum(position - window + 1, 0)
        page0 = tl.maximum(page0, tl.maximum(low - window + 1, 0) // 64)
    if page0 >= page_end:
        return
    head = kv_head * GROUP + r % GROUP
    q_row = query + (first_row + at).to(tl.int64) * query_stride + head * query_head_stride
    d = tl.arange(0, BLOCK_D if BLOCK_D <= 256 else CHUNK)
    q = tl.load(q_row[:, None] + d[None, :], mask=row_ok[:, None] & (d < depth)[None, :], other=0.0)
    top = tl.full([BLOCK_M], MASKED, dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_V], dtype=tl.float32)
    scale2 = score_scale * LOG2E
    for page in range(page0, page_end):
        physical = tl.load(block_table + sequence * table_stride + page).to(tl.int64)
        key = keys + physical * key_page_stride + kv_head * key_head_stride
        value = values + physical * value_page_stride + kv_head * value_head_stride
        key_scale, value_scale = keys, values  # of no meaning
        if QUANTISED:
            at_scale = physical * scale_page_stride + kv_head * scale_head_stride
            key_scale, value_scale = key_scales + at_scale, value_scales + at_scale
        for t0 in tl.static_range(0, 64, BLOCK_T):
            top, total, acc = attend(
                q_row, row_ok, q, key + t0 * key_stride, value + t0 * value_stride, key_scale + t0, value_scale + t0,
                page * 64 + t0, high, see_from, position + 1, top, total, acc,
                key_stride, value_stride, depth, value_depth, scale2,
                QUANTISED, REST, BLOCK_D, BLOCK_R, BLOCK_V, BLOCK_T,
            )  # fmt: skip
    out = (split.to(tl.int64) * tokens + first_row + at) * heads + head
    e = tl.arange(0, BLOCK_V)
    tl.store(tops + out, top, mask=row_ok)
    tl.store(totals + out, total, mask=row_ok)
    pointer = partial + out[:, None] * value_depth + e[None, :]
    tl.store(pointer, acc, mask=row_ok[:, None] & (e < value_depth)[None, :])
