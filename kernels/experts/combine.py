"""Adding up what a token's experts gave, always in top-k order. Importing this module imports triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from batchgen_lite.kernels.config import Config, lookup
from batchgen_lite.kernels.launch import FLOATS, Launch, capability_of, ceil_div, dtype_name, require, require_disjoint


@triton.jit(do_not_specialize=["columns"])
def combine_kernel(
    partial,
    base,
    out,
    columns,
    partial_stride,
    base_stride,
    out_stride,
    TOP_K: tl.constexpr,
    HAS_BASE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """out[t] = base[t] + ((partial[t, 0] + partial[t, 1]) + ...), in fp32. Grid (tokens, column tiles).

    Must move: T * (k + 2) * H elements; must do: T * (k + 1) * H additions. Bound by memory.
    """
    token = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = n < columns
    total = tl.zeros([BLOCK_N], dtype=tl.float32)
    for rank in tl.static_range(TOP_K):
        pointer = partial + (token * TOP_K + rank) * partial_stride + n
        total += tl.load(pointer, mask=mask, other=0.0).to(tl.float32)
    if HAS_BASE:
        total += tl.load(base + token * base_stride + n, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + token * out_stride + n, total.to(out.dtype.element_ty), mask=mask)


def combine(
    partial: torch.Tensor,
    out: torch.Tensor,
    top_k: int,
    *,
    base: torch.Tensor | None = None,
    config: Config | None = None,
) -> Launch:
    """Prepare the launch; ``.run()`` queues it.

    ``partial`` [T * top_k, H]: the output of ``down``; ``base`` [T, H] or None: added last (a shared expert's output,
    the residual); ``out`` [T, H], which may be ``base`` itself. Raises OperandError.
    """
    device = out.device
    require("out", out, (None, None), FLOATS, device)
    tokens, columns = out.shape
    require("partial", partial, (tokens * top_k, columns), FLOATS, device)
    require_disjoint("out", out, {"partial": partial})
    if base is not None:
        require("base", base, (tokens, columns), FLOATS, device)
        if base.data_ptr() != out.data_ptr() or base.stride() != out.stride():
            require_disjoint("out", out, {"base": base})
    config = config or lookup("combine", capability=capability_of(device), dtype=dtype_name(partial.dtype), n=columns)
    arguments = {
        "partial": partial,
        "base": base,
        "out": out,
        "columns": columns,
        "partial_stride": partial.stride(0),
        "base_stride": 0 if base is None else base.stride(0),
        "out_stride": out.stride(0),
        "TOP_K": top_k,
        "HAS_BASE": base is not None,
        "BLOCK_N": config.block_n,
    }
    grid = (tokens, ceil_div(columns, config.block_n))
    return Launch(combine_kernel, grid, arguments, config.num_warps, config.num_stages)
