"""Launching paged attention: what the host makes of a slice's spans, and the two launches of a layer.

Importing this module imports triton.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from batchgen_lite.kernels.attention.merge import merge_kernel
from batchgen_lite.kernels.attention.paged import paged_attention_kernel
from batchgen_lite.kernels.config import Config, lookup
from batchgen_lite.kernels.launch import (
    FLOATS,
    Launch,
    OperandError,
    capability_of,
    ceil_div,
    dtype_name,
    power_of_two,
    require,
    upload,
)

PAGE = 64  # positions in a page


@dataclass(frozen=True, slots=True)
class PageSpan:
    """Queries of positions [start, start + count) lie in rows [row, row + count) of the packed queries; ``sequence`` is
    the row of the block table."""

    sequence: int
    start: int
    row: int
    count: int


@dataclass(frozen=True, slots=True)
class PagedPlan:
    """Made once per sweep and slice, used by all layers of one shape.

    ``tiles`` int32 [n, 5]: sequence, start, row, count, first (position, head) row of the tile; ``positions`` int32
    [T], -1 for rows of no span; ``splits``: the most that any row needs; ``group``: query heads per KV head.
    """

    tiles: torch.Tensor
    positions: torch.Tensor
    splits: int
    group: int
    config: Config


def attention_config(device: torch.device, kv_dtype: torch.dtype, depth: int, group: int) -> Config:
    """Block sizes for keys of ``depth`` channels; they decide the splits, so a plan is made with them."""
    return lookup("attention", capability=capability_of(device), dtype=dtype_name(kv_dtype), n=group, k=depth)


def plan_spans(spans: Sequence[PageSpan], tokens: int, group: int, config: Config, device: torch.device) -> PagedPlan:
    """Cut spans into tiles of ``config.block_m`` rows: host work of O(tokens), two small copies to the device."""
    tiles, splits = [], 0
    positions = torch.full((tokens,), -1, dtype=torch.int32)
    for span in spans:
        if span.count < 1 or span.start < 0 or span.row < 0 or span.row + span.count > tokens:
            raise OperandError(f"{span}: rows must lie within the {tokens} packed tokens, with at least one position")
        last = span.start + span.count - 1
        positions[span.row : span.row + span.count] = torch.arange(span.start, last + 1, dtype=torch.int32)
        splits = max(splits, last // (PAGE * config.split) + 1)
        for row0 in range(0, span.count * group, config.block_m):
            tiles.append((span.sequence, span.start, span.row, span.count, row0))
    table = torch.tensor(tiles, dtype=torch.int32).reshape(len(tiles), 5)
    return PagedPlan(upload(table, device), upload(positions, device), splits, group, config)


@dataclass(frozen=True, slots=True)
class Int8Scales:
    """What int8 KV needs beside the pools: fp32 scales [P, Hkv, 64] of keys and values; those of the keys twice where
    the value is a part of the key."""

    keys: torch.Tensor
    values: torch.Tensor


def workspace_elements(plan: PagedPlan, heads: int, value_depth: int) -> int:
    """fp32 elements that ``paged_attention`` needs as workspace."""
    return plan.splits * plan.positions.shape[0] * heads * (value_depth + 2)


def paged_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor | None,
    block_table: torch.Tensor,
    plan: PagedPlan,
    out: torch.Tensor,
    workspace: torch.Tensor,
    *,
    scale: float,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
    int8: Int8Scales | None = None,
) -> tuple[Launch, Launch]:
    """Prepare softmax(scale * q k^T) v, causal, within ``window``; run both launches in order.

    ``query`` [T, Hq, D]; ``keys`` [P, Hkv, 64, D] and ``values`` [P, Hkv, 64, Dv]: a layer's page pools, any strides
    but the last; ``values`` None: latent attention, the value is the first out.shape[2] channels of the key.
    ``block_table`` int32 [sequences, pages]; ``out`` [T, Hq, Dv]; ``workspace`` fp32 [>= workspace_elements]; ``sinks``
    [Hq]; with ``int8`` the pools are int8. Query head h reads KV head h // (Hq / Hkv).
    Rows of no span are left alone. Raises OperandError.
    """
    device, tokens = query.device, plan.positions.shape[0]
    require("query", query, (tokens, None, None), FLOATS, device)
    heads, width = query.shape[1], query.shape[2]
    kv_heads = heads // plan.group
    store = torch.int8 if int8 is not None else query.dtype
    require("keys", keys, (None, kv_heads, PAGE, width), store, device)
    require("out", out, (tokens, heads, None), FLOATS, device)
    value_depth = out.shape[2]
    shared = values is None
    pool = keys if values is None else values
    if values is not None:
        require("values", values, (keys.shape[0], kv_heads, PAGE, value_depth), store, device)
    elif value_depth > width:
        raise OperandError(f"out: {value_depth} channels of a shared key of {width}; no more than it has are possible")
    require("block_table", block_table, (None, None), torch.int32, device)
    require("workspace", workspace, (None,), torch.float32, device)
    if workspace.numel() < workspace_elements(plan, heads, value_depth):
        raise OperandError(
            f"workspace: {workspace.numel()} elements, but {plan.splits} splits of {tokens} tokens need "
            f"{workspace_elements(plan, heads, value_depth)}; make it larger or the slice smaller"
        )
    if heads % plan.group:
        raise OperandError(f"query: {heads} heads do not fall into groups of {plan.group}; plan with Hq / Hkv")
    if sinks is not None:
        require("sinks", sinks, (heads,), FLOATS, device)
    depth = value_depth if shared else width
    rows = plan.splits * tokens * heads
    tops, totals = workspace[:rows], workspace[rows : 2 * rows]
    partial = workspace[2 * rows : 2 * rows + rows * value_depth]
    extra = _int8_operands(int8, keys)
    arguments = {
        "query": query,
        "keys": keys,
        "values": pool,
        **extra,
        "tiles": plan.tiles,
        "block_table": block_table,
        "partial": partial,
        "tops": tops,
        "totals": totals,
        "table_stride": block_table.stride(0),
        "query_stride": query.stride(0),
        "query_head_stride": query.stride(1),
        **_strides("key", keys),
        **_strides("value", pool),
        "tokens": tokens,
        "heads": heads,
        "depth": depth,
        "value_depth": value_depth,
        "window": window or 0,
        "score_scale": float(scale),
        "GROUP": plan.group,
        "QUANTISED": int8 is not None,
        "WINDOWED": window is not None,
        "REST": width - depth,
        "SPLIT": plan.config.split,
        "BLOCK_M": plan.config.block_m,
        "BLOCK_T": plan.config.block_k,
        "BLOCK_D": max(16, power_of_two(depth)),
        "BLOCK_R": max(16, power_of_two(width - depth)),
        "BLOCK_V": max(16, power_of_two(value_depth)),
    }
    grid = (plan.tiles.shape[0], kv_heads, plan.splits)
    attend = Launch(paged_attention_kernel, grid, arguments, plan.config.num_warps, plan.config.num_stages)
    return attend, _merge(partial, tops, totals, plan, sinks, out, window)


def _merge(
    partial: torch.Tensor,
    tops: torch.Tensor,
    totals: torch.Tensor,
    plan: PagedPlan,
    sinks: torch.Tensor | None,
    out: torch.Tensor,
    window: int | None,
) -> Launch:
    tokens, heads, value_depth = out.shape
    config = lookup("merge", capability=capability_of(out.device), dtype=dtype_name(out.dtype), n=value_depth)
    arguments = {
        "partial": partial,
        "tops": tops,
        "totals": totals,
        "positions": plan.positions,
        "sinks": sinks,
        "out": out,
        "tokens": tokens,
        "heads": heads,
        "value_depth": value_depth,
        "window": window or 0,
        "out_stride": out.stride(0),
        "out_head_stride": out.stride(1),
        "WINDOWED": window is not None,
        "HAS_SINKS": sinks is not None,
        "SPLIT": plan.config.split,
        "BLOCK_H": config.block_m,
        "BLOCK_V": power_of_two(value_depth),
    }
    grid = (tokens if plan.splits else 0, ceil_div(heads, config.block_m))
    return Launch(merge_kernel, grid, arguments, config.num_warps, config.num_stages)


def _strides(name: str, pool: torch.Tensor) -> dict[str, int]:
    return {
        f"{name}_page_stride": pool.stride(0),
        f"{name}_head_stride": pool.stride(1),
        f"{name}_stride": pool.stride(2),
    }


def _int8_operands(int8: Int8Scales | None, keys: torch.Tensor) -> dict[str, torch.Tensor | int | None]:
    """Scales by the kernel's names; nothing where the pools are not quantised."""
    if int8 is None:
        return {"key_scales": None, "value_scales": None, "scale_page_stride": 0, "scale_head_stride": 0}
    shape = (keys.shape[0], keys.shape[1], PAGE)
    require("key_scales", int8.keys, shape, torch.float32, keys.device)
    require("value_scales", int8.values, shape, torch.float32, keys.device)
    if int8.keys.stride() != int8.values.stride():
        raise OperandError("key_scales and value_scales: their strides differ; store both alike")
    return {
        "key_scales": int8.keys,
        "value_scales": int8.values,
        "scale_page_stride": int8.keys.stride(0),
        "scale_head_stride": int8.keys.stride(1),
    }
