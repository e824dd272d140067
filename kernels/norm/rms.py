"""RMSNorm, with the residual connection in the same pass. Importing this module imports triton.

Before a module ("pre"): h = x + r; h goes back to the residual stream, norm(h) on to the module. On a module's output
("post", OLMo 2): y = r + norm(x).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from batchgen_lite.kernels.config import Config, lookup
from batchgen_lite.kernels.launch import FLOATS, Launch, OperandError, capability_of, dtype_name, require


@triton.jit
def rms_norm_kernel(
    x,
    residual,
    weight,
    out,
    columns,
    eps,
    x_stride,
    residual_stride,
    out_stride,
    HAS_RESIDUAL: tl.constexpr,
    POST: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """norm(v) = v / sqrt(mean(v^2) + eps) * weight (Zhang & Sennrich 2019), in fp32. Grid (rows,).

    Must move: T * H elements per operand, once each (a row that exceeds BLOCK_N columns is read a second time, from
    the cache). Must do: 4 * T * H operations. Bound by memory.
    """
    row = tl.program_id(0).to(tl.int64)
    squares = tl.zeros([BLOCK_N], dtype=tl.float32)
    for n0 in range(0, columns, BLOCK_N):
        n = n0 + tl.arange(0, BLOCK_N)
        mask = n < columns
        value = tl.load(x + row * x_stride + n, mask=mask, other=0.0).to(tl.float32)
        if HAS_RESIDUAL and not POST:
            value += tl.load(residual + row * residual_stride + n, mask=mask, other=0.0).to(tl.float32)
            stored = value.to(residual.dtype.element_ty)
            tl.store(residual + row * residual_stride + n, stored, mask=mask)
            value = stored.to(tl.float32)  # the norm is of what the stream now holds
        squares += value * value
    scale = 1.0 / tl.sqrt_rn(tl.sum(squares, 0) / columns + eps)
    if HAS_RESIDUAL and not POST:
        tl.debug_barrier()  # the second pass reads what the first one stored
    for n0 in range(0, columns, BLOCK_N):
        n = n0 + tl.arange(0, BLOCK_N)
        mask = n < columns
        if HAS_RESIDUAL and not POST:
            value = tl.load(residual + row * residual_stride + n, mask=mask, other=0.0).to(tl.float32)
        else:
            value = tl.load(x + row * x_stride + n, mask=mask, other=0.0).to(tl.float32)
        value = value * scale * tl.load(weight + n, mask=mask, other=0.0).to(tl.float32)
        if POST and HAS_RESIDUAL:
            value += tl.load(residual + row * residual_stride + n, mask=mask, other=0.0).to(tl.float32)
        tl.store(out + row * out_stride + n, value.to(out.dtype.element_ty), mask=mask)


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    out: torch.Tensor,
    *,
    residual: torch.Tensor | None = None,
    post: bool = False,
    config: Config | None = None,
) -> Launch:
    """Prepare the launch; ``.run()`` queues it.

    ``x``, ``out`` [T, H] (rows may be strided), ``weight`` [H], ``residual`` [T, H]. Without ``residual``: out =
    norm(x). With it: residual += x in place and out = norm(residual) as stored; with ``post``: out = residual +
    norm(x). ``out`` may be ``x`` or, with ``post``, ``residual`` itself. Raises OperandError.
    """
    device = x.device
    require("x", x, (None, None), FLOATS, device)
    require("weight", weight, (x.shape[1],), FLOATS, device)
    require("out", out, tuple(x.shape), FLOATS, device)
    if residual is not None:
        require("residual", residual, tuple(x.shape), FLOATS, device)
    if post and residual is None:
        raise OperandError("post: norm on a module's output needs the residual it is added to; pass residual")
    config = config or lookup("rms_norm", capability=capability_of(device), dtype=dtype_name(x.dtype), n=x.shape[1])
    arguments = {
        "x": x,
        "residual": residual,
        "weight": weight,
        "out": out,
        "columns": x.shape[1],
        "eps": float(eps),
        "x_stride": x.stride(0),
        "residual_stride": 0 if residual is None else residual.stride(0),
        "out_stride": out.stride(0),
        "HAS_RESIDUAL": residual is not None,
        "POST": post,
        "BLOCK_N": config.block_n,
    }
    return Launch(rms_norm_kernel, (x.shape[0],), arguments, config.num_warps, config.num_stages)
