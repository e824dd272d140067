"""int8 KV: full pages from the staging pool to the int8 pool. Importing this module imports triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from batchgen_lite.kernels.config import Config, lookup
from batchgen_lite.kernels.launch import FLOATS, Launch, capability_of, dtype_name, power_of_two, require
from batchgen_lite.kernels.triton_math import round_half_even


@triton.jit
def quantise_pages_kernel(
    staged,
    pages,
    scales,
    pairs,
    depth,
    staged_page_stride,
    staged_head_stride,
    staged_stride,
    page_stride,
    head_stride,
    stride,
    scale_page_stride,
    BLOCK_D: tl.constexpr,
):
    """q = round(x / s), s = max |x| / 127 over the page and head (0 where all is 0), ties to even. Grid (pairs, heads).

    Must move: 64 * D elements in and 64 * D bytes out per page and head. Bound by memory.
    """
    source = tl.load(pairs + tl.program_id(0) * 2).to(tl.int64)
    target = tl.load(pairs + tl.program_id(0) * 2 + 1).to(tl.int64)
    head = tl.program_id(1)
    t = tl.arange(0, 64)
    d = tl.arange(0, BLOCK_D)
    mask = (d < depth)[None, :] & (t >= 0)[:, None]
    pointer = staged + source * staged_page_stride + head * staged_head_stride
    x = tl.load(pointer + t[:, None] * staged_stride + d[None, :], mask=mask, other=0.0).to(tl.float32)
    scale = tl.max(tl.max(tl.abs(x), 1), 0) / 127.0
    inverse = tl.where(scale > 0.0, 1.0 / tl.where(scale > 0.0, scale, 1.0), 0.0)
    q = round_half_even(tl.minimum(tl.maximum(x * inverse, -127.0), 127.0))
    pointer = pages + target * page_stride + head * head_stride
    tl.store(pointer + t[:, None] * stride + d[None, :], q.to(tl.int8), mask=mask)
    tl.store(scales + target * scale_page_stride + head, scale)


def quantise_pages(
    staged: torch.Tensor,
    pages: torch.Tensor,
    scales: torch.Tensor,
    pairs: torch.Tensor,
    *,
    config: Config | None = None,
) -> Launch:
    """Prepare the launch; ``.run()`` queues it. One call for keys, one for values.

    ``staged`` [S, Hkv, 64, D] floats; ``pages`` int8 [P, Hkv, 64, D]; ``scales`` fp32 [P, Hkv]; ``pairs`` int32 [n, 2]:
    (staging page, pool page) of each full page. Must run after the KV write and before the attention of the sweep that
    filled the page. Raises OperandError.
    """
    device = staged.device
    require("staged", staged, (None, None, 64, None), FLOATS, device)
    kv_heads, depth = staged.shape[1], staged.shape[3]
    require("pages", pages, (None, kv_heads, 64, depth), torch.int8, device)
    require("scales", scales, (pages.shape[0], kv_heads), torch.float32, device)
    require("pairs", pairs, (None, 2), torch.int32, device, dense=2)
    config = config or lookup("quantise", capability=capability_of(device), dtype=dtype_name(staged.dtype), n=depth)
    arguments = {
        "staged": staged,
        "pages": pages,
        "scales": scales,
        "pairs": pairs,
        "depth": depth,
        "staged_page_stride": staged.stride(0),
        "staged_head_stride": staged.stride(1),
        "staged_stride": staged.stride(2),
        "page_stride": pages.stride(0),
        "head_stride": pages.stride(1),
        "stride": pages.stride(2),
        "scale_page_stride": scales.stride(0),
        "BLOCK_D": power_of_two(depth),
    }
    return Launch(quantise_pages_kernel, (pairs.shape[0], kv_heads), arguments, config.num_warps, config.num_stages)
