"""int8 KV: new keys or values to the int8 pool, each position and head with its scale. Importing imports triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from batchgen_lite.kernels.config import Config, lookup
from batchgen_lite.kernels.launch import FLOATS, Launch, capability_of, dtype_name, power_of_two, require
from batchgen_lite.kernels.triton_math import round_half_even


@triton.jit
def quantise_write_kernel(
    rows,
    pages,
    scales,
    slots,
    heads,
    depth,
    row_stride,
    row_head_stride,
    page_stride,
    head_stride,
    stride,
    scale_page_stride,
    scale_head_stride,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """q = round(x / s), s = max |x| / 127 over the channels of a position and head (0 where all is 0), ties to even; s
    is NaN where a channel is not finite. Grid (tokens, head tiles).

    Must move: T * Hkv * D elements in, as many bytes and T * Hkv scales out. Must do: ~6 operations an element. Bound
    by memory.
    """
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    d = tl.arange(0, BLOCK_D)
    h_ok = h < heads
    mask = h_ok[:, None] & (d < depth)[None, :]
    pointer = rows + token * row_stride + h[:, None] * row_head_stride + d[None, :]
    x = tl.load(pointer, mask=mask, other=0.0).to(tl.float32)
    finite = tl.abs(x) <= 3.4028234663852886e38  # a maximum would overlook a NaN
    x = tl.where(finite, x, 0.0)
    scale = tl.max(tl.abs(x), 1) / 127.0 + tl.sum(tl.where(finite, 0.0, float("nan")), 1)
    inverse = tl.where(scale > 0.0, 1.0 / tl.where(scale > 0.0, scale, 1.0), 0.0)
    q = round_half_even(tl.minimum(tl.maximum(x * inverse[:, None], -127.0), 127.0))
    pointer = pages + slot // 64 * page_stride + h[:, None] * head_stride + slot % 64 * stride + d[None, :]
    tl.store(pointer, q.to(tl.int8), mask=mask)
    tl.store(scales + slot // 64 * scale_page_stride + h * scale_head_stride + slot % 64, scale, mask=h_ok)


def quantise_write(
    rows: torch.Tensor,
    pages: torch.Tensor,
    scales: torch.Tensor,
    slots: torch.Tensor,
    *,
    config: Config | None = None,
) -> Launch:
    """Prepare the launch; ``.run()`` queues it. One call for keys, one for values; none of the latter for MLA.

    ``rows`` [T, Hkv, D] floats, any strides but the last; ``pages`` int8 [P, Hkv, 64, D]; ``scales`` fp32
    [P, Hkv, 64]; ``slots`` int64 [T]: page * 64 + place within the page. ``rope_write`` fills such rows when it is
    given them as pages of their own (``rows.view(-1, 64, Hkv, D).transpose(1, 2)`` with slots 0, 1, 2, ...). Must run
    before the attention of the sweep. Raises OperandError.
    """
    device = rows.device
    require("rows", rows, (None, None, None), FLOATS, device)
    tokens, heads, depth = rows.shape
    require("pages", pages, (None, heads, 64, depth), torch.int8, device)
    require("scales", scales, (pages.shape[0], heads, 64), torch.float32, device)
    require("slots", slots, (tokens,), torch.int64, device)
    config = config or lookup("quantise", capability=capability_of(device), dtype=dtype_name(rows.dtype), n=depth)
    block = min(power_of_two(heads), max(1, 4096 // power_of_two(depth)))
    arguments = {
        "rows": rows,
        "pages": pages,
        "scales": scales,
        "slots": slots,
        "heads": heads,
        "depth": depth,
        "row_stride": rows.stride(0),
        "row_head_stride": rows.stride(1),
        "page_stride": pages.stride(0),
        "head_stride": pages.stride(1),
        "stride": pages.stride(2),
        "scale_page_stride": scales.stride(0),
        "scale_head_stride": scales.stride(1),
        "BLOCK_H": block,
        "BLOCK_D": power_of_two(depth),
    }
    grid = (tokens, -(-heads // block))
    return Launch(quantise_write_kernel, grid, arguments, config.num_warps, config.num_stages)
