"""Each head's own matrix on its own channels: the absorbed projections of latent attention (DeepSeek-V2, section 2.1).

    absorb_k    q'(h) = W_k(h)^T q(h)      columns of the stored rows run along the output
    absorb_v    o(h) = W_v(h) sum(h)       and here along the reduction

Both are one kernel with strides. Heads' matrices may lie anywhere in an arena. Importing this module imports triton.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from batchgen_lite.errors import UnsupportedError
from batchgen_lite.kernels.config import Config, lookup
from batchgen_lite.kernels.launch import (
    FLOATS,
    Launch,
    OperandError,
    capability_of,
    ceil_div,
    dtype_name,
    require,
    require_disjoint,
)
from batchgen_lite.kernels.triton_math import dot

ITEMSIZE = {"F32": 4, "F16": 2, "BF16": 2}


@triton.jit(do_not_specialize=["tokens"])
def absorb_kernel(
    x,
    out,
    arena,
    table,
    tokens,
    columns,
    K,
    x_stride,
    x_head_stride,
    out_stride,
    out_head_stride,
    n_stride,
    k_stride,
    ENCODING: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """out[t, h, n] = sum_k x[t, h, k] W(h)[n, k]. Grid (row tiles, column tiles, heads).

    Must move: every head's matrix once (N * K elements), T * heads * (K + N) elements in and out. Must do: 2 * T *
    heads * N * K operations. Bound by the weights up to ~100 tokens.
    """
    head = tl.program_id(2)
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    row_ok = row < tokens
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    n_ok = n < columns
    base = arena + tl.load(table + head)
    if ENCODING == "F32":
        weights = base.to(tl.pointer_type(tl.float32), bitcast=True)
    elif ENCODING == "F16":
        weights = base.to(tl.pointer_type(tl.float16), bitcast=True)
    else:
        weights = base.to(tl.pointer_type(tl.bfloat16), bitcast=True)
    x_row = x + row.to(tl.int64) * x_stride + head * x_head_stride
    total = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for k0 in range(0, K, BLOCK_K):
        k = k0 + tl.arange(0, BLOCK_K)
        k_ok = k < K
        a = tl.load(x_row[:, None] + k[None, :], mask=row_ok[:, None] & k_ok[None, :], other=0.0)
        at = k[:, None] * k_stride + n[None, :] * n_stride
        w = tl.load(weights + at, mask=k_ok[:, None] & n_ok[None, :], other=0.0)
        total = dot(a, w.to(x.dtype.element_ty), total)
    pointer = out + row.to(tl.int64)[:, None] * out_stride + head * out_head_stride + n[None, :]
    tl.store(pointer, total.to(out.dtype.element_ty), mask=row_ok[:, None] & n_ok[None, :])


def absorb(
    x: torch.Tensor,
    arena: torch.Tensor,
    table: torch.Tensor,
    encoding: str,
    out: torch.Tensor,
    *,
    transposed: bool,
    config: Config | None = None,
) -> Launch:
    """Prepare the launch; ``.run()`` queues it.

    ``x`` [T, heads, K] and ``out`` [T, heads, N], any strides but the last; ``table`` int64 [heads]: the byte in
    ``arena`` at which each head's matrix begins, stored densely in ``encoding`` ("F32" | "F16" | "BF16") as [N, K], or
    as [K, N] where ``transposed``. Raises OperandError, and UnsupportedError for other encodings.
    """
    device = x.device
    if encoding not in ITEMSIZE:
        raise UnsupportedError(f"head matrices stored as {encoding}: {', '.join(ITEMSIZE)} are taken; widen them first")
    require("x", x, (None, None, None), FLOATS, device)
    tokens, heads, depth = x.shape
    require("out", out, (tokens, heads, None), FLOATS, device)
    require("arena", arena, (None,), torch.uint8, device)
    require("table", table, (heads,), torch.int64, device)
    require_disjoint("out", out, {"x": x})
    columns = out.shape[2]
    if arena.numel() < depth * columns * ITEMSIZE[encoding]:
        raise OperandError(f"arena: {arena.numel()} bytes cannot hold a head's {columns} x {depth} {encoding} matrix")
    config = config or lookup(
        "absorb",
        capability=capability_of(device),
        dtype=encoding,
        compute=dtype_name(x.dtype),
        n=columns,
        k=depth,
    )
    arguments = {
        "x": x,
        "out": out,
        "arena": arena,
        "table": table,
        "tokens": tokens,
        "columns": columns,
        "K": depth,
        "x_stride": x.stride(0),
        "x_head_stride": x.stride(1),
        "out_stride": out.stride(0),
        "out_head_stride": out.stride(1),
        "n_stride": 1 if transposed else depth,
        "k_stride": columns if transposed else 1,
        "ENCODING": encoding,
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
    }
    grid = (ceil_div(tokens, config.block_m), ceil_div(columns, config.block_n), heads)
    return Launch(absorb_kernel, grid, arguments, config.num_warps, config.num_stages)
