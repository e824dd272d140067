"""Every kernel on the card against float64, in bf16 and fp16, with outputs that were NaN before; and a row's bits alone
and among others."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from gpu_check import Context, Line
from gpu_check_weights import Weights, random_weights

from batchgen_lite.kernels.attention.paged_launch import (
    Int8Scales,
    PageSpan,
    attention_config,
    paged_attention,
    plan_spans,
    workspace_elements,
)
from batchgen_lite.kernels.attention.quantise import quantise_write
from batchgen_lite.kernels.attention.quantise_reference import dequantise
from batchgen_lite.kernels.experts.combine import combine
from batchgen_lite.kernels.experts.gate_up import gate_up
from batchgen_lite.kernels.experts.project import down, linear
from batchgen_lite.kernels.experts.weights import ENCODINGS
from batchgen_lite.kernels.norm.rms import rms_norm
from batchgen_lite.kernels.router.assign import sort_assignments
from batchgen_lite.kernels.router.reference import route
from batchgen_lite.kernels.router.topk import topk
from batchgen_lite.models.spec import FFNSpec, RouterSpec

TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
TOP_K = 2
Rows = Callable[[torch.Tensor], torch.Tensor]
"""A computation whose rows should not see each other."""


def poisoned(*shape: int, like: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    return torch.full(shape, float("nan"), dtype=dtype or like.dtype, device=like.device)


def judge(what: str, got: torch.Tensor, wanted: torch.Tensor, tolerance: float) -> Line:
    """Root mean square error relative to the values' size; NaN is wrong."""
    difference = got.double() - wanted.double()
    error = float((difference.square().mean() / (wanted.double().square().mean() + 1e-30)).sqrt())
    return Line(what, f"relative error {error:.1e} (at most {tolerance:.1e})", error <= tolerance, {"error": error})


def dtypes(context: Context) -> tuple[torch.dtype, ...]:
    return (torch.float32,) if context.dry else (torch.bfloat16, torch.float16)


def random(*shape: int, device: str, dtype: torch.dtype, seed: int = 0, spread: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * spread).to(dtype).to(device)


def numbers(context: Context) -> Iterator[Line]:
    for dtype in dtypes(context):
        name = str(dtype).removeprefix("torch.")
        for encoding in ("BF16", "Q8_0") if context.dry else ENCODINGS:
            if encoding == "F32" and dtype != torch.float32:
                continue
            yield from experts(context, encoding, dtype, name)
        for window in (None, 20):
            yield attention(context, dtype, f"attention {name}, window {window}", window=window)
        yield attention(context, dtype, f"attention {name}, int8 KV", int8=True)
        yield norm(context, dtype, f"rms_norm {name}")
    yield router(context)


def experts(context: Context, encoding: str, dtype: torch.dtype, name: str) -> Iterator[Line]:
    """gate_up, down and combine of a small layer, one expert empty, and linear."""
    count, hidden, width, tokens = (3, 64, 32, 5) if context.dry else (128, 256, 256, 96)
    device = context.device
    weights = random_weights(encoding, count, ((width, hidden), (width, hidden), (hidden, width)), device)
    x = random(tokens, hidden, device=device, dtype=dtype)
    ids = (torch.arange(tokens, device=device)[:, None] * TOP_K + torch.arange(TOP_K, device=device)) % (count - 1)
    factors = random(tokens, TOP_K, device=device, dtype=torch.float32, seed=9).abs()
    partial = expert_layer(x, ids, factors, weights, width)
    wanted = torch.zeros(tokens, TOP_K, hidden, dtype=torch.float64)
    ids, wide = ids.cpu(), x.double().cpu()
    for token in range(tokens):
        for rank in range(TOP_K):
            gate, up, last = (w.values[int(ids[token, rank])].double() for w in weights)
            middle = torch.nn.functional.silu(gate @ wide[token]) * (up @ wide[token])
            wanted[token, rank] = last @ middle * float(factors[token, rank])
    tolerance = TOLERANCE[dtype]
    yield judge(f"experts {encoding} {name}", partial.view(tokens, TOP_K, hidden).cpu(), wanted, 2 * tolerance)
    out = poisoned(tokens, hidden, like=x, dtype=torch.float32)
    combine(partial, out, TOP_K).run()
    if bool(out.isnan().any()):
        yield Line(f"combine {encoding} {name}", "leaves outputs unwritten", False)
    row, table = weights[0].values[0].double(), weights[0].alone()
    product = poisoned(tokens, width, like=x)
    linear(x, table, product).run()
    yield judge(f"linear {encoding} {name}", product.cpu(), wide @ row.t(), tolerance)


def expert_layer(
    x: torch.Tensor, ids: torch.Tensor, factors: torch.Tensor, weights: list[Weights], width: int
) -> torch.Tensor:
    """What each assignment gives, fp32 [T * k, H]."""
    gate, up, last = (w.table for w in weights)
    assigned = sort_assignments(ids, factors, gate.experts)
    who = torch.arange(gate.experts, dtype=torch.int32, device=x.device)
    inner = poisoned(ids.numel(), width, like=x)
    gate_up(x, gate, up, assigned.tokens, assigned.offsets, who, FFNSpec(width), inner).run()
    partial = poisoned(ids.numel(), last.rows, like=x, dtype=torch.float32)
    down(inner, last, assigned.order, assigned.weights, assigned.offsets, who, partial).run()
    return partial


def attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, lengths: list[int], window: int | None,
    scales: Int8Scales | None = None,
) -> torch.Tensor:  # fmt: skip
    """One decode step of each of ``lengths``, pages dealt out in turn."""
    device, group = query.device, query.shape[1] // keys.shape[1]
    most = max(-(-length // 64) for length in lengths)
    table = (
        torch.arange(len(lengths) * most, dtype=torch.int32, device=device).view(most, len(lengths)).t().contiguous()
    )
    config = attention_config(device, keys.dtype, keys.shape[3], group)
    spans = [PageSpan(row, length - 1, row, 1) for row, length in enumerate(lengths)]
    plan = plan_spans(spans, len(lengths), group, config, device)
    out = poisoned(*query.shape[:2], values.shape[3], like=query)
    room = torch.empty(workspace_elements(plan, query.shape[1], values.shape[3]), device=device)
    for launch in paged_attention(query, keys, values, table, plan, out, room, scale=0.2, window=window, int8=scales):
        launch.run()
    return out


def attention(
    context: Context, dtype: torch.dtype, what: str, *, window: int | None = None, int8: bool = False
) -> Line:
    lengths = [3, 70] if context.dry else [1, 64, 65, 700, 1999]
    heads, kv_heads, depth = (4, 2, 16) if context.dry else (32, 4, 128)
    pages = len(lengths) * max(-(-length // 64) for length in lengths)
    device = context.device
    keys, values = (random(pages, kv_heads, 64, depth, device=device, dtype=dtype, seed=s) for s in (1, 2))
    query = random(len(lengths), heads, depth, device=device, dtype=dtype, seed=3)
    scales, stored = None, (keys, values)
    if int8:
        stored, scales = quantised(keys, values)
        keys, values = (dequantise(p, s) for p, s in zip(stored, (scales.keys, scales.values), strict=True))
    got = attend(query, *stored, lengths, window, scales)
    wanted = torch.zeros(len(lengths), heads, depth, dtype=torch.float64)
    for row, length in enumerate(lengths):
        own = [page * len(lengths) + row for page in range(-(-length // 64))]
        k, v = (pool[own].double().cpu().transpose(0, 1).reshape(kv_heads, -1, depth)[:, :length]
                for pool in (keys, values))  # fmt: skip
        first = 0 if window is None else max(0, length - window)
        for head in range(heads):
            at = head // (heads // kv_heads)
            scores = k[at, first:] @ query[row, head].double().cpu() * 0.2
            wanted[row, head] = torch.softmax(scores, 0) @ v[at, first:]
    return judge(what, got.cpu(), wanted, 2 * TOLERANCE[dtype])


def quantised(keys: torch.Tensor, values: torch.Tensor) -> tuple[tuple[torch.Tensor, torch.Tensor], Int8Scales]:
    pools, scales = [], []
    for pool in (keys, values):
        pages, heads, _, depth = pool.shape
        rows = pool.transpose(1, 2).reshape(pages * 64, heads, depth)
        pools.append(torch.zeros(pool.shape, dtype=torch.int8, device=pool.device))
        scales.append(torch.full((pages, heads, 64), float("nan"), device=pool.device))
        quantise_write(rows, pools[-1], scales[-1], torch.arange(pages * 64, device=pool.device)).run()
    return (pools[0], pools[1]), Int8Scales(scales[0], scales[1])


def norm(context: Context, dtype: torch.dtype, what: str) -> Line:
    x = random(7, 72 if context.dry else 5120, device=context.device, dtype=dtype)
    weight = random(x.shape[1], device=context.device, dtype=torch.float32, seed=1)
    out = poisoned(*x.shape, like=x)
    rms_norm(x, weight, 1e-6, out).run()
    wide = x.double().cpu()
    wanted = wide * (wide.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight.double().cpu()
    return judge(what, out.cpu(), wanted, TOLERANCE[dtype])


def router(context: Context) -> Line:
    experts_, top_k, tokens = (8, 2, 5) if context.dry else (128, 8, 300)
    spec = RouterSpec(experts_, top_k, renormalise=True)
    logits = random(tokens, experts_, device=context.device, dtype=torch.float32)
    ids = torch.full((tokens, top_k), -1, dtype=torch.int32, device=context.device)
    weights = poisoned(tokens, top_k, like=logits)
    topk(logits, spec, ids, weights).run()
    wanted, factors = route(logits.cpu(), spec)
    same = torch.equal(ids.cpu().long(), wanted)
    error = float((weights.cpu() - factors).abs().max())
    return Line("router", f"same experts: {same}, weights off by {error:.1e}", same and error < 1e-6)


def bits(context: Context) -> Iterator[Line]:
    """Row 3 alone, among 7 and among 500, through every kernel that has rows."""
    device = context.device
    many = 20 if context.dry else 500
    for dtype in dtypes(context):
        name = str(dtype).removeprefix("torch.")
        hidden, width = (64, 32) if context.dry else (2048, 768)
        for encoding in ("BF16",) if context.dry else ("BF16", "INT4", "Q4_K", "F8_E4M3"):
            weights = random_weights(encoding, 1, ((width, hidden),), device)[0].alone()

            def product(x: torch.Tensor, weights=weights) -> torch.Tensor:  # type: ignore[no-untyped-def]
                out = poisoned(x.shape[0], weights.rows, like=x)
                linear(x, weights, out).run()
                return out

            yield same_bits(f"linear {encoding} {name}", product, hidden, many, dtype, device)
        weight = random(hidden, device=device, dtype=torch.float32)

        def normed(x: torch.Tensor, weight: torch.Tensor = weight) -> torch.Tensor:
            out = poisoned(*x.shape, like=x)
            rms_norm(x, weight, 1e-6, out).run()
            return out

        yield same_bits(f"rms_norm {name}", normed, hidden, many, dtype, device)
        layer = random_weights("BF16", 4, ((width, hidden), (width, hidden), (hidden, width)), device)

        def routed(x: torch.Tensor, layer: list[Weights] = layer, width: int = width) -> torch.Tensor:
            # The experts of a row follow from its contents, as with a real router.
            ids = torch.stack([(x[:, 0] > 0).long(), 2 + (x[:, 1] > 0).long()], 1)
            factors = torch.stack([x[:, 2], x[:, 3]], 1).float()
            out = poisoned(x.shape[0], layer[2].table.rows, like=x, dtype=torch.float32)
            combine(expert_layer(x, ids, factors, layer, width), out, TOP_K).run()
            return out

        yield same_bits(f"experts {name}", routed, hidden, many, dtype, device)


def same_bits(what: str, compute: Rows, width: int, many: int, dtype: torch.dtype, device: str) -> Line:
    x = random(many, width, device=device, dtype=dtype, seed=5)
    row = [compute(part)[at] for part, at in ((x[3:4], 0), (x[:7], 3), (x, 3))]
    same = torch.equal(row[0], row[1]) and torch.equal(row[0], row[2]) and not bool(row[0].isnan().any())
    return Line(f"{what}: alone, in 7, in {many}", "the same bits" if same else "other bits", same)
