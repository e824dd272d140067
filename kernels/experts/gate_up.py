"""The first half of the grouped expert FFN: gate and up projections and the activation, in one kernel.

For every assignment a (a token and one of its experts), out[a] = act(x[t] Wg^T + bg, x[t] Wu^T + bu), W of a's expert,
dequantised in registers.
Importing this module imports triton.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from batchgen_lite.kernels.config import Config, lookup
from batchgen_lite.kernels.dequant.tile import load_tile, part_columns
from batchgen_lite.kernels.experts.tiles import find_tile, tile_bound
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
from batchgen_lite.kernels.triton_math import dot, gated
from batchgen_lite.models.spec import FFNSpec


@triton.jit(do_not_specialize=["num_experts", "column0", "columns"])
def gate_up_kernel(
    x,
    out,
    arena,
    gate_table,
    up_table,
    bias,
    tokens,
    offsets,
    experts,
    num_experts,
    column0,
    columns,
    K,
    x_stride,
    out_stride,
    row_stride,
    scale_stride,
    bias_stride,
    bias_up,
    alpha,
    limit,
    ENCODING: tl.constexpr,
    PARTS: tl.constexpr,
    GROUP: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    SCALE_KIND: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    ACTIVATION: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Grid (row tiles, column tiles); neighbouring programs share a column tile's weights through the L2 cache.

    Must move: the launched experts' gate and up rows once (``2 * WeightTable.nbytes()`` each), x once per assignment
    at worst, A * I outputs. Must do: 4 * A * I * H operations. With fewer than ~100 assignments per expert the weights'
    bytes are the bound.
    """
    expert, row0, row_end = find_tile(offsets, experts, num_experts, tl.program_id(0), BLOCK_E, BLOCK_M)
    if expert < 0:
        return
    row = row0 + tl.arange(0, BLOCK_M)
    row_ok = row < row_end
    token = tl.load(tokens + row, mask=row_ok, other=0).to(tl.int64)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    n_ok = n < columns
    wide = n.to(tl.int64)
    gate = tl.multiple_of(tl.load(gate_table + expert * 3), ALIGNMENT)
    up = tl.multiple_of(tl.load(up_table + expert * 3), ALIGNMENT)
    gate_scales = tl.load(gate_table + expert * 3 + 1)
    up_scales = tl.load(up_table + expert * 3 + 1)
    gate_zeros = tl.load(gate_table + expert * 3 + 2)
    up_zeros = tl.load(up_table + expert * 3 + 2)
    gate_sum = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    up_sum = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    x_row = x + token * x_stride
    for k0 in range(0, K, BLOCK_K):
        for part in tl.static_range(PARTS):
            k = k0 + part_columns(ENCODING, PARTS, part, BLOCK_K)
            a = tl.load(x_row[:, None] + k[None, :], mask=row_ok[:, None] & (k < K)[None, :], other=0.0)
            w = load_tile(
                arena, gate, gate_scales, gate_zeros, wide, n_ok, k0, K, row_stride, scale_stride,
                ENCODING, part, GROUP, SCALE_ROWS, SCALE_KIND, HAS_ZEROS, BLOCK_N, BLOCK_K,
            )  # fmt: skip
            gate_sum = dot(a, tl.trans(w.to(x.dtype.element_ty)), gate_sum)
            w = load_tile(
                arena, up, up_scales, up_zeros, wide, n_ok, k0, K, row_stride, scale_stride,
                ENCODING, part, GROUP, SCALE_ROWS, SCALE_KIND, HAS_ZEROS, BLOCK_N, BLOCK_K,
            )  # fmt: skip
            up_sum = dot(a, tl.trans(w.to(x.dtype.element_ty)), up_sum)
    if HAS_BIAS:
        pointer = bias + expert.to(tl.int64) * bias_stride + column0 + n
        gate_sum += tl.load(pointer, mask=n_ok, other=0.0).to(tl.float32)[None, :]
        up_sum += tl.load(pointer + bias_up, mask=n_ok, other=0.0).to(tl.float32)[None, :]
    result = gated(gate_sum, up_sum, ACTIVATION, alpha, limit)
    pointer = out + row.to(tl.int64)[:, None] * out_stride + (column0 + n)[None, :]
    tl.store(pointer, result.to(out.dtype.element_ty), mask=row_ok[:, None] & n_ok[None, :])


def gate_up(
    x: torch.Tensor,
    gate: WeightTable,
    up: WeightTable,
    tokens: torch.Tensor,
    offsets: torch.Tensor,
    experts: torch.Tensor,
    spec: FFNSpec,
    out: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    column0: int = 0,
    max_rows: int | None = None,
    config: Config | None = None,
) -> Launch:
    """Prepare the launch; ``.run()`` queues it.

    ``x`` [T, H] fp32, fp16 or bf16; ``gate`` and ``up``: tables of [rows, H] matrices, the rows [column0, column0 +
    rows) of the experts' gate and up matrices, stored alike in one arena; ``tokens`` int32 [A]: the token of each
    assignment, sorted by expert; ``offsets`` int32 [E + 1]; ``experts`` int32 [n]: the experts to run, each once and in
    memory; ``bias`` [E, 2 * intermediate], gate first; ``out`` [A, intermediate], rows of other experts and columns
    outside the tile are left alone. ``max_rows``: an upper bound of these experts' assignments, if known on the host.

    Raises OperandError for operands that do not fit together.
    """
    device = x.device
    require("x", x, (None, gate.cols), FLOATS, device)
    require("tokens", tokens, (None,), torch.int32, device)
    assignments = tokens.shape[0]
    require("out", out, (assignments, spec.intermediate), x.dtype, device)
    require("offsets", offsets, (gate.experts + 1,), torch.int32, device)
    require("experts", experts, (None,), torch.int32, device)
    require("arena", gate.arena, (None,), torch.uint8, device)
    require_disjoint("out", out, {"x": x})
    _require_pair(gate, up)
    if column0 < 0 or column0 + gate.rows > spec.intermediate:
        raise OperandError(
            f"rows [{column0}, {column0 + gate.rows}) reach beyond the width {spec.intermediate}; pass its tile"
        )
    if bias is not None:
        require("bias", bias, (gate.experts, 2 * spec.intermediate), FLOATS, device)
    scheme = encoding_of(gate.encoding)
    config = config or lookup(
        "gate_up",
        capability=capability_of(device),
        dtype=gate.encoding,
        compute=dtype_name(x.dtype),
        n=gate.rows,
        k=gate.cols,
    )
    rows = assignments if max_rows is None else min(max_rows, assignments)
    grid = (tile_bound(rows, experts.shape[0], config.block_m), ceil_div(gate.rows, config.block_n))
    arguments = {
        "x": x,
        "out": out,
        "arena": gate.arena,
        "gate_table": gate.table,
        "up_table": up.table,
        "bias": bias,
        "tokens": tokens,
        "offsets": offsets,
        "experts": experts,
        "num_experts": experts.shape[0],
        "column0": column0,
        "columns": gate.rows,
        "K": gate.cols,
        "x_stride": x.stride(0),
        "out_stride": out.stride(0),
        "row_stride": gate.row_stride,
        "scale_stride": gate.scale_stride,
        "bias_stride": 0 if bias is None else bias.stride(0),
        "bias_up": spec.intermediate,
        "alpha": float(spec.alpha),
        "limit": float(spec.limit),
        "ENCODING": gate.encoding,
        "PARTS": scheme.parts,
        "GROUP": gate.scales.group,
        "SCALE_ROWS": gate.scales.rows,
        "SCALE_KIND": gate.scales.kind,
        "HAS_ZEROS": gate.scales.zeros,
        "ALIGNMENT": min(gate.alignment, up.alignment),
        "ACTIVATION": spec.activation,
        "HAS_BIAS": bias is not None,
        "BLOCK_E": power_of_two(experts.shape[0]),
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
    }
    return Launch(gate_up_kernel, grid, arguments, config.num_warps, config.num_stages)


def _require_pair(gate: WeightTable, up: WeightTable) -> None:
    if gate.arena is not up.arena and gate.arena.data_ptr() != up.arena.data_ptr():
        raise OperandError("gate and up lie in different arenas; place both in one")
    for name in ("encoding", "rows", "cols", "row_stride", "scales", "experts"):
        a, b = getattr(gate, name), getattr(up, name)
        if a != b:
            raise OperandError(f"gate and up differ in {name}: {a} and {b}; a pair is stored alike")
