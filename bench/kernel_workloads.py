"""Work for every Triton kernel, at shapes of real models, with the bytes it must move and the operations it must do.

A workload's tensors are made on the given device ("meta" gives the figures without memory). The figures are lower
bounds: every operand once, padding and repeated reads not counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from batchgen_lite.kernels.attention.absorb import absorb
from batchgen_lite.kernels.attention.paged_launch import (
    Int8Scales,
    PageSpan,
    attention_config,
    paged_attention,
    plan_spans,
    workspace_elements,
)
from batchgen_lite.kernels.attention.quantise import quantise_write
from batchgen_lite.kernels.experts.combine import combine
from batchgen_lite.kernels.experts.gate_up import gate_up
from batchgen_lite.kernels.experts.project import down, linear
from batchgen_lite.kernels.experts.weights import ENCODINGS, Scales, WeightTable, weight_table
from batchgen_lite.kernels.launch import Launch
from batchgen_lite.kernels.norm.rms import rms_norm
from batchgen_lite.kernels.rope.latent import latent_write
from batchgen_lite.kernels.rope.write import rope_write
from batchgen_lite.kernels.router.assign import sort_assignments
from batchgen_lite.kernels.router.topk import topk
from batchgen_lite.models.spec import FFNSpec, RouterSpec

EXPERTS, TOP_K, HIDDEN, WIDTH = 128, 8, 2048, 768  # Qwen3-30B-A3B
HEADS, KV_HEADS, DEPTH = 32, 4, 128


@dataclass(frozen=True)
class Work:
    """One measurement: the launches, and what they must move (bytes) and do (operations; a multiply-add is two)."""

    name: str
    launches: tuple[Launch, ...]
    nbytes: int
    operations: int


Make = Callable[[torch.device, torch.dtype], Work]


def workloads(device: torch.device, dtype: torch.dtype) -> Iterator[Work]:
    """Every kernel; the expert kernels in every format at a decode batch and, in two formats, at a prefill batch."""
    for encoding in ENCODINGS:
        yield from experts(encoding, 256, device, dtype)
    for encoding in ("BF16", "Q4_K"):
        yield from experts(encoding, 4096, device, dtype)
        yield dense(encoding, 512, device, dtype)
    yield attention("decode, 128 sequences of 2,000", [(1999, 1)] * 128, device, dtype)
    yield attention("prefill, 2 spans of 1,024", [(1024, 1024)] * 2, device, dtype)
    yield attention("decode, int8 KV", [(1999, 1)] * 128, device, dtype, int8=True)
    yield latent(64, device, dtype)
    for transposed in (True, False):
        yield absorbed(64, device, dtype, transposed=transposed)
    yield from small(512, device, dtype)


def uniform(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if device.type == "meta":
        return torch.empty(shape, dtype=dtype, device=device)
    return torch.empty(shape, dtype=torch.float32, device=device).uniform_(-0.1, 0.1).to(dtype)


def matrices(encoding: str, rows: int, cols: int, count: int, device: torch.device) -> WeightTable:
    """``count`` matrices behind each other, each with its scales. Bytes 0x11 are small finite values everywhere."""
    scheme = ENCODINGS[encoding]
    scales = {
        "INT8": Scales("fp16", 64),
        "INT4": Scales("fp16", 32),
        "F8_E4M3": Scales("fp32", 128, 128),
        "MXFP4_BLOCKS": Scales("e8m0", 32),
    }.get(encoding, Scales())
    data = rows * (cols // scheme.block) * scheme.block_bytes
    beside = -(-rows // scales.rows) * scales.per_row(cols) * 4 if scheme.companions else 0
    step = (data + beside + 255) // 256 * 256
    arena = torch.full((step * count,), 0x11, dtype=torch.uint8, device=device)
    offsets = [step * number for number in range(count)]
    beside_offsets = [offset + data for offset in offsets] if scheme.companions else None
    return weight_table(arena, encoding, rows, cols, offsets, scales=scales, scale_offsets=beside_offsets)


def experts(encoding: str, tokens: int, device: torch.device, dtype: torch.dtype) -> Iterator[Work]:
    """One MoE layer of Qwen3-30B-A3B: every expert touched, assignments spread evenly."""
    dtype = torch.float32 if encoding == "F32" else dtype
    count, size = tokens * TOP_K, dtype.itemsize
    pair = matrices(encoding, WIDTH, HIDDEN, 2 * EXPERTS, device)
    gate = WeightTable(
        pair.arena, encoding, WIDTH, HIDDEN, pair.table[0::2].contiguous(), pair.row_stride, 16, pair.scales
    )
    up = WeightTable(
        pair.arena, encoding, WIDTH, HIDDEN, pair.table[1::2].contiguous(), pair.row_stride, 16, pair.scales
    )
    matrix = matrices(encoding, HIDDEN, WIDTH, EXPERTS, device)
    ids = (torch.arange(tokens, device=device)[:, None] * TOP_K + torch.arange(TOP_K, device=device)) % EXPERTS
    plan = sort_assignments(ids, uniform((tokens, TOP_K), torch.float32, device), EXPERTS)
    who = torch.arange(EXPERTS, dtype=torch.int32, device=device)
    x, inner = uniform((tokens, HIDDEN), dtype, device), uniform((count, WIDTH), dtype, device)
    partial = uniform((count, HIDDEN), torch.float32, device)
    first = gate_up(x, gate, up, plan.tokens, plan.offsets, who, FFNSpec(WIDTH), inner)
    second = down(inner, matrix, plan.order, plan.weights, plan.offsets, who, partial)
    label = f"{encoding}, {tokens} tokens"
    moved = EXPERTS * 2 * gate.nbytes() + (tokens * HIDDEN + count * WIDTH) * size
    yield Work(f"gate_up {label}", (first,), moved, 4 * count * WIDTH * HIDDEN)
    moved = EXPERTS * matrix.nbytes() + count * WIDTH * size + count * HIDDEN * 4
    yield Work(f"down {label}", (second,), moved, 2 * count * WIDTH * HIDDEN)


def dense(encoding: str, tokens: int, device: torch.device, dtype: torch.dtype) -> Work:
    columns = (HEADS + 2 * KV_HEADS) * DEPTH
    matrix = matrices(encoding, columns, HIDDEN, 1, device)
    launch = linear(uniform((tokens, HIDDEN), dtype, device), matrix, uniform((tokens, columns), dtype, device))
    moved = matrix.nbytes() + tokens * (HIDDEN + columns) * dtype.itemsize
    return Work(f"linear {encoding}, {tokens} tokens", (launch,), moved, 2 * tokens * columns * HIDDEN)


def attention(
    label: str, shapes: list[tuple[int, int]], device: torch.device, dtype: torch.dtype, *, int8: bool = False
) -> Work:
    """``shapes``: (start, count) of each sequence's span."""
    tokens, store = sum(count for _, count in shapes), torch.int8 if int8 else dtype
    pages = [-(-(start + count) // 64) for start, count in shapes]
    table = torch.arange(len(shapes) * max(pages), dtype=torch.int32, device=device).view(len(shapes), max(pages))
    row, spans = 0, []
    for number, (start, count) in enumerate(shapes):
        spans.append(PageSpan(number, start, row, count))
        row += count
    config = attention_config(device, store, DEPTH, HEADS // KV_HEADS)
    plan = plan_spans(spans, tokens, HEADS // KV_HEADS, config, device)
    pool = uniform((table.numel(), KV_HEADS, 64, DEPTH), dtype, device).to(store)
    scales = uniform((table.numel(), KV_HEADS, 64), torch.float32, device)
    launches = paged_attention(
        uniform((tokens, HEADS, DEPTH), dtype, device), pool, pool, table, plan,
        uniform((tokens, HEADS, DEPTH), dtype, device),
        uniform((workspace_elements(plan, HEADS, DEPTH),), torch.float32, device),
        scale=DEPTH**-0.5, int8=Int8Scales(scales, scales) if int8 else None,
    )  # fmt: skip
    seen = sum(start * count + count * (count + 1) // 2 for start, count in shapes)
    moved = sum(pages) * 2 * KV_HEADS * 64 * DEPTH * pool.itemsize + 2 * tokens * HEADS * DEPTH * dtype.itemsize
    return Work(f"attention {label}", launches, moved, 4 * seen * HEADS * DEPTH)


def latent(sequences: int, device: torch.device, dtype: torch.dtype) -> Work:
    """Decoding with DeepSeek-V3's cache: 128 heads share one key of 512 + 64 channels."""
    heads, rank, width, length = 128, 512, 576, 1000
    config = attention_config(device, dtype, width, heads)
    plan = plan_spans([PageSpan(n, length - 1, n, 1) for n in range(sequences)], sequences, heads, config, device)
    table = torch.arange(sequences * 16, dtype=torch.int32, device=device).view(sequences, 16)
    pool = uniform((sequences * 16, 1, 64, width), dtype, device)
    launches = paged_attention(
        uniform((sequences, heads, width), dtype, device), pool, None, table, plan,
        uniform((sequences, heads, rank), dtype, device),
        uniform((workspace_elements(plan, heads, rank),), torch.float32, device), scale=0.1,
    )  # fmt: skip
    moved = sequences * (length * width + heads * (width + rank)) * dtype.itemsize
    return Work(
        f"attention latent, {sequences} sequences", launches, moved, 2 * sequences * length * heads * (width + rank)
    )


def absorbed(tokens: int, device: torch.device, dtype: torch.dtype, *, transposed: bool) -> Work:
    """One of DeepSeek-V3's absorbed projections: 128 heads, 128 plain or value channels, rank 512."""
    heads, plain, rank = 128, 128, 512
    size = dtype.itemsize
    arena = torch.full((heads * plain * rank * size,), 0x11, dtype=torch.uint8, device=device)
    table = torch.arange(heads, dtype=torch.int64, device=device) * (plain * rank * size)
    short, long = uniform((tokens, heads, plain), dtype, device), uniform((tokens, heads, rank), dtype, device)
    x, out = (short, long) if transposed else (long, short)
    encoding = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}[dtype]
    launch = absorb(x, arena, table, encoding, out, transposed=transposed)
    moved = arena.numel() + tokens * heads * (plain + rank) * size
    name = f"absorb_{'k' if transposed else 'v'}, {tokens} tokens"
    return Work(name, (launch,), moved, 2 * tokens * heads * plain * rank)


def small(tokens: int, device: torch.device, dtype: torch.dtype) -> Iterator[Work]:
    """Kernels that are bound by memory and launch time."""
    size = dtype.itemsize

    def made(*shape: int, kind: torch.dtype = dtype) -> torch.Tensor:
        return uniform(shape, kind, device)

    partial, out = made(tokens * TOP_K, HIDDEN, kind=torch.float32), made(tokens, HIDDEN)
    yield Work(
        "combine",
        (combine(partial, out, TOP_K, base=out),),
        partial.numel() * 4 + 2 * out.numel() * size,
        partial.numel(),
    )
    x, residual, weight = made(tokens, HIDDEN), made(tokens, HIDDEN), made(HIDDEN, kind=torch.float32)
    norm = rms_norm(x, weight, 1e-6, made(tokens, HIDDEN), residual=residual)
    yield Work("rms_norm with residual", (norm,), 4 * x.numel() * size, 5 * x.numel())
    qkv, q_out = made(tokens, (HEADS + 2 * KV_HEADS) * DEPTH), made(tokens, HEADS, DEPTH)
    pool, angles = made(-(-tokens // 64), KV_HEADS, 64, DEPTH), made(tokens, DEPTH // 2, kind=torch.float32)
    slots, head = torch.arange(tokens, device=device), made(DEPTH, kind=torch.float32)
    other = made(-(-tokens // 64), KV_HEADS, 64, DEPTH)
    rope = rope_write(qkv, angles, angles, slots, q_out, pool, other, q_weight=head, k_weight=head, eps=1e-6)
    yield Work("rope_write with q/k norm", (rope,), 2 * qkv.numel() * size, 10 * qkv.numel())
    kv, wide = made(tokens, 576), made(tokens, 128, 64)
    cache, turns = made(-(-tokens // 64), 1, 64, 576), made(tokens, 32, kind=torch.float32)
    rank = made(512, kind=torch.float32)
    write = latent_write(kv, wide, rank, turns, turns, slots, made(tokens, 128, 64), cache, 1e-6)
    yield Work("latent_write", (write,), 2 * (kv.numel() + wide.numel()) * size, 10 * (kv.numel() + wide.numel()))
    logits, spec = made(tokens, EXPERTS, kind=torch.float32), RouterSpec(EXPERTS, TOP_K, renormalise=True)
    ids = torch.zeros(tokens, TOP_K, dtype=torch.int32, device=device)
    choose = topk(logits, spec, ids, made(tokens, TOP_K, kind=torch.float32))
    yield Work("topk", (choose,), logits.numel() * 4 + tokens * TOP_K * 8, logits.numel() * (TOP_K + 10))
    pages = torch.zeros(-(-tokens // 64), KV_HEADS, 64, DEPTH, dtype=torch.int8, device=device)
    rows, scales = made(tokens, KV_HEADS, DEPTH), made(pages.shape[0], KV_HEADS, 64, kind=torch.float32)
    quantise = quantise_write(rows, pages, scales, slots)
    yield Work("quantise_write", (quantise,), rows.numel() * (size + 1) + 4 * tokens * KV_HEADS, 6 * rows.numel())
