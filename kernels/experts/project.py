"""Products of token rows with matrices in an arena: the experts' down projection, and any dense linear layer.

Down: out[dest[a]] = weight[a] * (x[a] W_e^T + b_e), e the expert of assignment a. The results of one token's experts
land in rows of their own, in top-k order, and ``combine.py`` adds them up in that order: no atomics, so the sum's order
does not depend on which expert ran first. A dense layer is the same kernel with one matrix and the rows as they are.
Importing this module imports triton.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from batchgen_lite.kernels.config import Config, lookup
from batchgen_lite.kernels.dequant.tile import load_tile, part_columns
from batchgen_lite.kernels.experts.tiles import find_tile, row_tiles, tile_bound
from batchgen_lite.kernels.experts.weights import WeightTable, encoding_of
from batchgen_lite.kernels.launch import (
    FLOATS,
    Launch,
    OperandError,
    capability_of,
    ceil_div,
    dtype_name,
    power_of_two,
    require,
    require_disjoint,
)
from batchgen_lite.kernels.triton_math import dot


@triton.jit(do_not_specialize=["num_experts", "num_rows", "column0", "columns"])
def project_kernel(
    x,
    out,
    arena,
    table,
    bias,
    dest,
    weights,
    offsets,
    experts,
    num_experts,
    num_rows,
    column0,
    columns,
    K,
    x_stride,
    out_stride,
    row_stride,
    scale_stride,
    bias_stride,
    ENCODING: tl.constexpr,
    PARTS: tl.constexpr,
    GROUP: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    SCALE_KIND: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    GROUPED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Grid (row tiles, column tiles).

    Must move: every matrix once (``WeightTable.nbytes()``), A * K inputs and A * N outputs. Must do: 2 * A * N * K
    operations.
    """
    if GROUPED:
        expert, row0, row_end = find_tile(offsets, experts, num_experts, tl.program_id(0), BLOCK_E, BLOCK_M)
        if expert < 0:
            return
    else:
        expert = tl.program_id(0) * 0
        row0 = tl.program_id(0) * BLOCK_M
        row_end = num_rows
    row = row0 + tl.arange(0, BLOCK_M)
    row_ok = row < row_end
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    n_ok = n < columns
    wide = n.to(tl.int64)
    data = tl.multiple_of(tl.load(table + expert * 3), ALIGNMENT)
    scales = tl.load(table + expert * 3 + 1)
    zeros = tl.load(table + expert * 3 + 2)
    total = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    x_row = x + row.to(tl.int64) * x_stride
    for k0 in range(0, K, BLOCK_K):
        for part in tl.static_range(PARTS):
            k = k0 + part_columns(ENCODING, PARTS, part, BLOCK_K)
            a = tl.load(x_row[:, None] + k[None, :], mask=row_ok[:, None] & (k < K)[None, :], other=0.0)
            w = load_tile(
                arena, data, scales, zeros, wide, n_ok, k0, K, row_stride, scale_stride,
                ENCODING, part, GROUP, SCALE_ROWS, SCALE_KIND, HAS_ZEROS, BLOCK_N, BLOCK_K,
            )  # fmt: skip
            total = dot(a, tl.trans(w.to(x.dtype.element_ty)), total)
    if HAS_BIAS:
        pointer = bias + expert.to(tl.int64) * bias_stride + column0 + n
        total += tl.load(pointer, mask=n_ok, other=0.0).to(tl.float32)[None, :]
    if HAS_WEIGHTS:
        total *= tl.load(weights + row, mask=row_ok, other=0.0)[:, None]
    target = row.to(tl.int64)
    if GROUPED:
        target = tl.load(dest + row, mask=row_ok, other=0).to(tl.int64)
    pointer = out + target[:, None] * out_stride + (column0 + n)[None, :]
    tl.store(pointer, total.to(out.dtype.element_ty), mask=row_ok[:, None] & n_ok[None, :])


def down(
    x: torch.Tensor,
    matrix: WeightTable,
    dest: torch.Tensor,
    weights: torch.Tensor,
    offsets: torch.Tensor,
    experts: torch.Tensor,
    out: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    column0: int = 0,
    max_rows: int | None = None,
    config: Config | None = None,
) -> Launch:
    """Prepare the launch; ``.run()`` queues it.

    ``x`` [A, I]: the output of ``gate_up``, sorted by expert; ``matrix``: table of [rows, I] matrices, the rows
    [column0, column0 + rows) of the experts' down matrices; ``dest`` int32 [A]: the row of ``out`` of each assignment
    (token * k + rank in the token's top-k); ``weights`` fp32 [A]: the router's, sorted by expert; ``offsets`` int32
    [E + 1]; ``experts`` int32 [n]; ``bias`` [E, H]; ``out`` [T * k, H], rows of other experts are left alone.

    Raises OperandError for operands that do not fit together.
    """
    device = x.device
    require("dest", dest, (x.shape[0],), torch.int32, device)
    require("weights", weights, (x.shape[0],), torch.float32, device)
    require("offsets", offsets, (matrix.experts + 1,), torch.int32, device)
    require("experts", experts, (None,), torch.int32, device)
    arguments = _arguments(x, matrix, out, bias, column0)
    config = config or _config("down", x, matrix)
    rows = x.shape[0] if max_rows is None else min(max_rows, x.shape[0])
    grid = (tile_bound(rows, experts.shape[0], config.block_m), ceil_div(matrix.rows, config.block_n))
    arguments |= {"dest": dest, "weights": weights, "offsets": offsets, "experts": experts}
    arguments |= {"num_experts": experts.shape[0], "GROUPED": True, "HAS_WEIGHTS": True}
    arguments |= _blocks(config, experts.shape[0])
    return Launch(project_kernel, grid, arguments, config.num_warps, config.num_stages)


def linear(
    x: torch.Tensor,
    matrix: WeightTable,
    out: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    row_weights: torch.Tensor | None = None,
    column0: int = 0,
    config: Config | None = None,
) -> Launch:
    """Prepare out[t] = row_weights[t] * (x[t] W^T + b) for one matrix; ``.run()`` queues it.

    ``x`` [T, K]; ``matrix``: a table of one expert, rows [column0, column0 + rows) of the layer's matrix; ``bias``
    [1, N]; ``row_weights`` fp32 [T] (a gated shared expert's gate); ``out`` [T, N]. Raises OperandError.
    """
    if matrix.experts != 1:
        raise OperandError(f"matrix: a table of {matrix.experts} matrices, but a dense layer has one; pass its table")
    arguments = _arguments(x, matrix, out, bias, column0)
    require("out", out, (x.shape[0], None), FLOATS, x.device)
    if row_weights is not None:
        require("row_weights", row_weights, (x.shape[0],), torch.float32, x.device)
    config = config or _config("linear", x, matrix)
    grid = (row_tiles(x.shape[0], config.block_m), ceil_div(matrix.rows, config.block_n))
    arguments |= {"dest": None, "weights": row_weights, "offsets": None, "experts": None, "num_experts": 1}
    arguments |= {"GROUPED": False, "HAS_WEIGHTS": row_weights is not None}
    arguments |= _blocks(config, 1)
    return Launch(project_kernel, grid, arguments, config.num_warps, config.num_stages)


def _arguments(
    x: torch.Tensor, matrix: WeightTable, out: torch.Tensor, bias: torch.Tensor | None, column0: int
) -> dict[str, Any]:
    """Check what both uses share, and name their arguments."""
    device = x.device
    require("x", x, (None, matrix.cols), FLOATS, device)
    require("out", out, (None, None), FLOATS, device)
    require("arena", matrix.arena, (None,), torch.uint8, device)
    require_disjoint("out", out, {"x": x})
    if column0 < 0 or column0 + matrix.rows > out.shape[1]:
        raise OperandError(f"rows [{column0}, {column0 + matrix.rows}) reach beyond out's {out.shape[1]} columns")
    if bias is not None:
        require("bias", bias, (matrix.experts, out.shape[1]), FLOATS, device)
    scheme = encoding_of(matrix.encoding)
    return {
        "x": x,
        "out": out,
        "arena": matrix.arena,
        "table": matrix.table,
        "bias": bias,
        "num_rows": x.shape[0],
        "column0": column0,
        "columns": matrix.rows,
        "K": matrix.cols,
        "x_stride": x.stride(0),
        "out_stride": out.stride(0),
        "row_stride": matrix.row_stride,
        "scale_stride": matrix.scale_stride,
        "bias_stride": 0 if bias is None else bias.stride(0),
        "ENCODING": matrix.encoding,
        "PARTS": scheme.parts,
        "GROUP": matrix.scales.group,
        "SCALE_ROWS": matrix.scales.rows,
        "SCALE_KIND": matrix.scales.kind,
        "HAS_ZEROS": matrix.scales.zeros,
        "ALIGNMENT": matrix.alignment,
        "HAS_BIAS": bias is not None,
    }


def _config(op: str, x: torch.Tensor, matrix: WeightTable) -> Config:
    capability, compute = capability_of(x.device), dtype_name(x.dtype)
    return lookup(op, capability=capability, dtype=matrix.encoding, compute=compute, n=matrix.rows, k=matrix.cols)


def _blocks(config: Config, experts: int) -> dict[str, int]:
    return {
        "BLOCK_E": power_of_two(experts),
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
    }
