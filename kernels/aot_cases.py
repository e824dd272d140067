"""What is compiled ahead of time: the launchers, called on ``meta`` tensors of the shapes of real models.

The full matrix (every weight format, head shape and variant) for the cards that the product is for, Ada (8.9) and
consumer Blackwell (12.0); one case of each kernel for Ampere (8.0, 8.6) and Hopper (9.0).
"""

from __future__ import annotations

from functools import partial

import torch

from batchgen_lite.kernels.aot import Build, Case
from batchgen_lite.kernels.attention.absorb import absorb
from batchgen_lite.kernels.attention.paged_launch import Int8Scales, PageSpan, attention_config, plan_spans
from batchgen_lite.kernels.attention.paged_launch import paged_attention as attention
from batchgen_lite.kernels.attention.quantise import quantise_write
from batchgen_lite.kernels.experts.combine import combine
from batchgen_lite.kernels.experts.gate_up import gate_up
from batchgen_lite.kernels.experts.project import down, linear
from batchgen_lite.kernels.experts.weights import ENCODINGS, Scales, WeightTable, weight_table
from batchgen_lite.kernels.launch import Launch
from batchgen_lite.kernels.norm.rms import rms_norm
from batchgen_lite.kernels.rope.latent import latent_write
from batchgen_lite.kernels.rope.write import rope_write
from batchgen_lite.kernels.router.topk import topk
from batchgen_lite.models.spec import FFNSpec, RouterSpec

FULL = (89, 120)
SAMPLED = (80, 86, 90)
SAMPLES = (
    "gate_up-bf16", "down-q4_k", "linear-f8_e4m3", "combine", "attention-bf16-128", "merge", "quantise-bf16",
    "absorb_k-bf16", "rms_norm-bf16", "rope_write-qwen3", "latent_write", "topk-softmax",
)  # fmt: skip
"""At least one case of each kernel."""

TOKENS, EXPERTS, TOP_K, HIDDEN, WIDTH = 512, 128, 8, 2048, 768  # Qwen3-30B-A3B
ROWS = TOKENS * TOP_K
BF16, FP16, FP32, INT32, INT64 = torch.bfloat16, torch.float16, torch.float32, torch.int32, torch.int64


def cases() -> list[Case]:
    """All cases, in a fixed order; keys are unique."""
    builds = _experts() | _attention() | _small()
    found = [Case(name, capability, build) for name, build in builds.items() for capability in FULL]
    return found + [Case(name, capability, builds[name]) for name in SAMPLES for capability in SAMPLED]


def meta(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _experts() -> dict[str, Build]:
    scales = {
        "INT8": Scales("fp16", 64),
        "INT4": Scales("fp16", 32, zeros=True),
        "F8_E4M3": Scales("fp32", 128, 128),
        "MXFP4_BLOCKS": Scales("e8m0", 32),
    }
    builds: dict[str, Build] = {}
    for encoding in ENCODINGS:
        dtype, chosen = {"F32": FP32, "F16": FP16}.get(encoding, BF16), scales.get(encoding, Scales())
        for op, build in (("gate_up", _gate_up), ("down", _down), ("linear", _linear)):
            builds[f"{op}-{encoding.lower()}"] = partial(build, encoding, chosen, dtype)
            if encoding in ("Q8_0", "Q6_K"):
                builds[f"{op}-{encoding.lower()}-fp32"] = partial(build, encoding, chosen, FP32)
    # As runtime/triton_operations.py mixes types: the residual stream is fp32, what experts give is 16 bits wide.
    builds["linear-bf16-out-fp32"] = partial(_linear, "BF16", Scales(), BF16, FP32)
    builds["linear-q4_k-out-fp32"] = partial(_linear, "Q4_K", Scales(), BF16, FP32)
    builds["linear-f32-bf16"] = partial(_linear, "F32", Scales(), BF16, FP32)
    builds["down-bf16-out-bf16"] = partial(_down, "BF16", Scales(), BF16, BF16)
    builds["down-q4_0-out-bf16"] = partial(_down, "Q4_0", Scales(), BF16, BF16)
    builds["combine-bf16-to-fp32"] = lambda: combine(
        meta(ROWS, HIDDEN), meta(TOKENS, HIDDEN, dtype=FP32), TOP_K, base=meta(TOKENS, HIDDEN, dtype=FP32)
    )
    builds["gate_up-gpt-oss"] = partial(_gate_up, "MXFP4_BLOCKS", Scales("e8m0", 32), BF16, "swigluoai")
    builds["gate_up-q4_k-fp16-gelu"] = partial(_gate_up, "Q4_K", Scales(), FP16, "gelu")
    builds["gate_up-int8-per-row"] = partial(_gate_up, "INT8", Scales("fp32", 0), BF16)
    builds["combine"] = lambda: combine(
        meta(ROWS, HIDDEN, dtype=FP32), meta(TOKENS, HIDDEN), TOP_K, base=meta(TOKENS, HIDDEN)
    )
    return builds


def _table(encoding: str, scales: Scales, rows: int, cols: int, experts: int) -> WeightTable:
    offsets = [0] * experts
    return weight_table(
        meta(1 << 30, dtype=torch.uint8), encoding, rows, cols, offsets, scales=scales,
        scale_offsets=offsets if ENCODINGS[encoding].companions else None,
        zero_offsets=offsets if scales.zeros else None,
    )  # fmt: skip


def _routing() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Per assignment one int32, the offsets, and the 16 experts of a launch."""
    return meta(ROWS, dtype=INT32), meta(EXPERTS + 1, dtype=INT32), meta(16, dtype=INT32)


def _gate_up(encoding: str, scales: Scales, dtype: torch.dtype, activation: str = "silu") -> Launch:
    matrix = _table(encoding, scales, WIDTH, HIDDEN, EXPERTS)
    bias = meta(EXPERTS, 2 * WIDTH, dtype=FP32) if activation == "swigluoai" else None
    x, out = meta(TOKENS, HIDDEN, dtype=dtype), meta(ROWS, WIDTH, dtype=dtype)
    return gate_up(x, matrix, matrix, *_routing(), FFNSpec(WIDTH, activation), out, bias=bias)


def _down(encoding: str, scales: Scales, dtype: torch.dtype, out_dtype: torch.dtype = FP32) -> Launch:
    matrix = _table(encoding, scales, HIDDEN, WIDTH, EXPERTS)
    dest, offsets, experts = _routing()
    x, out = meta(ROWS, WIDTH, dtype=dtype), meta(ROWS, HIDDEN, dtype=out_dtype)
    return down(x, matrix, dest, meta(ROWS, dtype=FP32), offsets, experts, out)


def _linear(encoding: str, scales: Scales, dtype: torch.dtype, out_dtype: torch.dtype | None = None) -> Launch:
    matrix = _table(encoding, scales, 5120, HIDDEN, 1)
    return linear(meta(TOKENS, HIDDEN, dtype=dtype), matrix, meta(TOKENS, 5120, dtype=out_dtype or dtype))


def _attention() -> dict[str, Build]:
    return {
        "attention-bf16-64": partial(_attend, BF16, 32, 8, 64, 64),
        "attention-bf16-128": partial(_attend, BF16, 32, 4, 128, 128),
        "attention-fp16-128": partial(_attend, FP16, 32, 8, 128, 128),
        "attention-fp32-128": partial(_attend, FP32, 32, 8, 128, 128),
        "attention-bf16-96": partial(_attend, BF16, 32, 32, 96, 96),
        "attention-bf16-256": partial(_attend, BF16, 16, 8, 256, 256),
        "attention-bf16-gpt-oss": partial(_attend, BF16, 64, 8, 64, 64, window=128),
        "attention-bf16-mla": partial(_attend, BF16, 128, 1, 576, 512),
        "attention-fp32-64": partial(_attend, FP32, 14, 2, 64, 64),
        "attention-int8-128": partial(_attend, BF16, 32, 4, 128, 128, int8=True),
        "attention-int8-256": partial(_attend, BF16, 16, 8, 256, 256, int8=True),
        "attention-int8-mla": partial(_attend, BF16, 128, 1, 576, 512, int8=True),
        "attention-int8-64-window": partial(_attend, BF16, 64, 8, 64, 64, window=128, int8=True),
        "merge": partial(_attend, BF16, 32, 4, 128, 128, merge=True),
        "merge-gpt-oss": partial(_attend, BF16, 64, 8, 64, 64, window=128, merge=True),
        "merge-mla": partial(_attend, BF16, 128, 1, 576, 512, merge=True),
        "quantise-bf16": partial(_quantise, BF16),
        "quantise-fp16": partial(_quantise, FP16),
    }


def _attend(
    dtype: torch.dtype, heads: int, kv_heads: int, depth: int, value_depth: int, *, window: int | None = None,
    int8: bool = False, merge: bool = False,
) -> Launch:  # fmt: skip
    device, store = torch.device("meta"), torch.int8 if int8 else dtype
    config = attention_config(device, store, depth, heads // kv_heads)
    plan = plan_spans([PageSpan(0, 1000, 0, TOKENS)], TOKENS, heads // kv_heads, config, device)
    keys = meta(4096, 48, kv_heads, 64, depth, dtype=store)[:, 0]  # pages of 48 layers in one arena
    values = meta(4096, 48, kv_heads, 64, value_depth, dtype=store)[:, 0] if depth == value_depth else None
    scales = meta(4096, kv_heads, 64, dtype=FP32)
    return attention(
        meta(TOKENS, heads, depth, dtype=dtype), keys, values, meta(256, 512, dtype=INT32), plan,
        meta(TOKENS, heads, value_depth, dtype=dtype), meta(1 << 30, dtype=FP32), scale=0.1, window=window,
        sinks=meta(heads, dtype=FP32) if window is not None else None,
        int8=Int8Scales(scales, scales) if int8 else None,
    )[1 if merge else 0]  # fmt: skip


def _quantise(dtype: torch.dtype) -> Launch:
    rows, pages = meta(TOKENS, 4, 128, dtype=dtype), meta(4096, 48, 4, 64, 128, dtype=torch.int8)[:, 0]
    return quantise_write(rows, pages, meta(4096, 4, 64, dtype=FP32), meta(TOKENS, dtype=INT64))


def _small() -> dict[str, Build]:
    grouped = RouterSpec(
        256, 8, scoring="sigmoid", renormalise=True, scaling=2.5, num_groups=8, topk_group=4, group_score="top2",
        correction_bias=True,
    )  # fmt: skip
    return {
        "absorb_k-bf16": partial(_absorb, True, BF16, "BF16"),
        "absorb_v-bf16": partial(_absorb, False, BF16, "BF16"),
        "absorb_k-fp32": partial(_absorb, True, FP32, "F32"),
        "absorb_v-fp16": partial(_absorb, False, FP16, "F16"),
        "rms_norm-bf16": partial(_norm, BF16, HIDDEN, True, False),
        "rms_norm-fp32-stream": partial(_norm_of_stream, HIDDEN),
        "rms_norm-bf16-narrow": partial(_norm, BF16, 1024, True, False),
        "rms_norm-fp16-plain": partial(_norm, FP16, 4096, False, False),
        "rms_norm-bf16-post": partial(_norm, BF16, 7168, True, True),
        "rope_write-llama": partial(_rope, BF16, 32, 8, 128, 128, None),
        "rope_write-qwen3": partial(_rope, BF16, 32, 4, 128, 128, "head"),
        "rope_write-olmoe": partial(_rope, BF16, 16, 16, 128, 128, "full"),
        "rope_write-gpt-oss": partial(_rope, FP16, 64, 8, 64, 64, None),
        "rope_write-interleaved-partial": partial(_rope, BF16, 96, 8, 128, 64, None, interleaved=True),
        "latent_write": _latent,
        "topk-softmax": partial(_topk, RouterSpec(128, 8, renormalise=True)),
        "topk-gpt-oss": partial(_topk, RouterSpec(32, 4, scoring="softmax_topk")),
        "topk-deepseek-v3": partial(_topk, grouped),
    }


def _norm_of_stream(columns: int) -> Launch:
    """An fp32 delta joins the fp32 stream; its norm is 16 bits wide."""
    x, stream = meta(TOKENS, columns, dtype=FP32), meta(TOKENS, columns, dtype=FP32)
    return rms_norm(x, meta(columns, dtype=FP32), 1e-6, meta(TOKENS, columns), residual=stream)


def _norm(dtype: torch.dtype, columns: int, residual: bool, post: bool) -> Launch:
    x, stream = meta(TOKENS, columns, dtype=dtype), meta(TOKENS, columns, dtype=dtype)
    weight = meta(columns, dtype=FP32)
    return rms_norm(
        x, weight, 1e-6, meta(TOKENS, columns, dtype=dtype), residual=stream if residual else None, post=post
    )


def _rope(
    dtype: torch.dtype, heads: int, kv_heads: int, depth: int, rotary: int, norm: str | None, *,
    interleaved: bool = False,
) -> Launch:  # fmt: skip
    weights = {
        None: (None, None),
        "head": (meta(depth, dtype=FP32), meta(depth, dtype=FP32)),
        "full": (meta(heads * depth, dtype=FP32), meta(kv_heads * depth, dtype=FP32)),
    }[norm]
    angles = meta(TOKENS, rotary // 2, dtype=FP32)
    pool = meta(4096, 48, kv_heads, 64, depth, dtype=dtype)[:, 0]
    return rope_write(
        meta(TOKENS, (heads + 2 * kv_heads) * depth, dtype=dtype), angles, angles, meta(TOKENS, dtype=INT64),
        meta(TOKENS, heads, depth, dtype=dtype), pool, pool, interleaved=interleaved,
        q_weight=weights[0], k_weight=weights[1], eps=1e-6,
    )  # fmt: skip


def _latent() -> Launch:
    q, absorbed = meta(TOKENS, 128, 192), meta(TOKENS, 128, 576)
    angles = meta(TOKENS, 32, dtype=FP32)
    return latent_write(
        meta(TOKENS, 576), q[:, :, 128:], meta(512, dtype=FP32), angles, angles, meta(TOKENS, dtype=INT64),
        absorbed[:, :, 512:], meta(4096, 61, 1, 64, 576)[:, 0], 1e-6, interleaved=True,
    )  # fmt: skip


def _absorb(transposed: bool, dtype: torch.dtype, encoding: str) -> Launch:
    """DeepSeek-V3: 128 heads of 128 plain channels, rank 512; queries are views of rows of 192 and of 576."""
    plain, query = meta(TOKENS, 128, 192, dtype=dtype)[:, :, :128], meta(TOKENS, 128, 576, dtype=dtype)[:, :, :512]
    x, out = (
        (plain, query) if transposed else (meta(TOKENS, 128, 512, dtype=dtype), meta(TOKENS, 128, 128, dtype=dtype))
    )
    arena, table = meta(1 << 30, dtype=torch.uint8), meta(128, dtype=INT64)
    return absorb(x, arena, table, encoding, out, transposed=transposed)


def _topk(spec: RouterSpec) -> Launch:
    bias = meta(spec.num_experts, dtype=FP32) if spec.correction_bias else None
    ids, weights = meta(TOKENS, spec.top_k, dtype=INT32), meta(TOKENS, spec.top_k, dtype=FP32)
    return topk(meta(TOKENS, spec.num_experts, dtype=FP32), spec, ids, weights, correction_bias=bias)
