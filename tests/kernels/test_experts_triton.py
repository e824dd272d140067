"""The grouped expert kernels against float64: every weight format, odd shapes, empty and crowded experts."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from packed_weights import Packed, random_matrix, tables

from batchgen_lite.kernels.experts.combine import combine
from batchgen_lite.kernels.experts.gate_up import gate_up
from batchgen_lite.kernels.experts.project import down, linear
from batchgen_lite.kernels.experts.weights import Scales, weight_table
from batchgen_lite.kernels.router.assign import Assignments, sort_assignments
from batchgen_lite.models.spec import FFNSpec

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}

FORMATS = [
    pytest.param("F32", Scales(), id="F32"),
    pytest.param("F16", Scales(), id="F16"),
    pytest.param("BF16", Scales(), id="BF16"),
    pytest.param("INT8", Scales("fp32", 0), id="INT8-per-row"),
    pytest.param("INT8", Scales("bf16", 32), id="INT8-groups"),
    pytest.param("INT4", Scales("fp16", 32), id="INT4-32"),
    pytest.param("INT4", Scales("fp16", 32, zeros=True), id="INT4-zeros"),
    pytest.param("INT4", Scales("fp32", 128, zeros=True), id="INT4-128"),
    pytest.param("F8_E4M3", Scales("fp32", 128, 128), id="FP8-128x128"),
    pytest.param("F8_E4M3", Scales("bf16", 32, 16), id="FP8-16x32"),
    pytest.param("MXFP4_BLOCKS", Scales("e8m0", 32), id="MXFP4-gpt-oss"),
    pytest.param("MXFP4", Scales(), id="MXFP4-gguf"),
    pytest.param("Q8_0", Scales(), id="Q8_0"),
    pytest.param("Q4_0", Scales(), id="Q4_0"),
    pytest.param("Q4_K", Scales(), id="Q4_K"),
    pytest.param("Q6_K", Scales(), id="Q6_K"),
]


def columns_of(encoding: str, scales: Scales) -> int:
    """A K that is no multiple of the tile where the format allows it."""
    if encoding in ("Q4_K", "Q6_K"):
        return 256
    return {0: 96, 32: 96, 64: 128, 128: 256}[scales.group]


def close(actual: torch.Tensor, expected: np.ndarray, tolerance: float) -> None:
    """Root mean square error relative to the expected values' size, and no element far out. Fails on NaN."""
    error = actual.double().cpu().numpy() - expected
    size = math.sqrt(float(np.mean(expected**2))) + 1e-30
    assert math.sqrt(float(np.mean(error**2))) <= tolerance * size
    assert float(np.abs(error).max()) <= 12 * tolerance * size


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def activate(gate: np.ndarray, up: np.ndarray, spec: FFNSpec) -> np.ndarray:
    if spec.activation == "silu":
        return silu(gate) * up
    if spec.activation == "gelu":
        return gate * 0.5 * (1 + np.vectorize(math.erf)(gate / math.sqrt(2))) * up
    if spec.activation == "gelu_tanh":
        return gate * 0.5 * (1 + np.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3))) * up
    gate, up = np.minimum(gate, spec.limit), np.clip(up, -spec.limit, spec.limit)
    return gate / (1 + np.exp(-spec.alpha * gate)) * (up + 1)


def routes(rng: np.random.Generator, tokens: int, experts: int, top_k: int) -> torch.Tensor:
    chosen = [rng.permutation(experts)[:top_k] for _ in range(tokens)]
    return torch.from_numpy(np.array(chosen, dtype=np.int64).reshape(tokens, top_k)).to(DEVICE)


def matrices(encoding: str, count: int, rows: int, cols: int, rng: np.random.Generator, scales: Scales) -> list[Packed]:
    return [random_matrix(encoding, rows, cols, rng, scales) for _ in range(count)]


def everyone(experts: int) -> torch.Tensor:
    return torch.arange(experts, dtype=torch.int32, device=DEVICE)


def poisoned(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.full(shape, float("nan"), dtype=dtype, device=DEVICE)


class Layer:
    """An expert layer with its float64 truth."""

    def __init__(
        self, encoding: str, scales: Scales, spec: FFNSpec, hidden: int, experts: int, seed: int, bias: bool = False
    ) -> None:
        rng = np.random.default_rng(seed)
        self.rng, self.spec, self.hidden, self.experts = rng, spec, hidden, experts
        width = spec.intermediate
        self.gate = matrices(encoding, experts, width, hidden, rng, scales)
        self.up = matrices(encoding, experts, width, hidden, rng, scales)
        self.down = matrices(encoding, experts, hidden, width, rng, scales)
        order = list(rng.permutation(experts))
        self.gate_table, self.up_table = tables(encoding, [self.gate, self.up], width, hidden, scales, DEVICE, order)
        (self.down_table,) = tables(encoding, [self.down], hidden, width, scales, DEVICE, order)
        self.gate_up_bias = torch.from_numpy(rng.standard_normal((experts, 2 * width))).float() if bias else None
        self.down_bias = torch.from_numpy(rng.standard_normal((experts, hidden))).float() if bias else None

    def run(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, base: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, Assignments]:
        plan = sort_assignments(ids, weights, self.experts)
        inner = poisoned(ids.numel(), self.spec.intermediate, dtype=x.dtype)
        partial = poisoned(ids.numel(), self.hidden, dtype=torch.float32)
        out = poisoned(x.shape[0], self.hidden, dtype=torch.float32)
        who = everyone(self.experts)
        gate_bias, down_bias = (b if b is None else b.to(DEVICE) for b in (self.gate_up_bias, self.down_bias))
        gate_up(
            x, self.gate_table, self.up_table, plan.tokens, plan.offsets, who, self.spec, inner, bias=gate_bias
        ).run()
        down(inner, self.down_table, plan.order, plan.weights, plan.offsets, who, partial, bias=down_bias).run()
        combine(partial, out, ids.shape[1], base=base).run()
        return out, plan

    def truth(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> np.ndarray:
        rows = x.double().cpu().numpy()
        width = self.spec.intermediate
        out = np.zeros((len(rows), self.hidden))
        for token, (chosen, share) in enumerate(zip(ids.tolist(), weights.double().tolist(), strict=True)):
            for expert, weight in zip(chosen, share, strict=True):
                gate, up = self.gate[expert].values @ rows[token], self.up[expert].values @ rows[token]
                if self.gate_up_bias is not None:
                    bias = self.gate_up_bias[expert].double().numpy()
                    gate, up = gate + bias[:width], up + bias[width:]
                result = self.down[expert].values @ activate(gate, up, self.spec)
                if self.down_bias is not None:
                    result = result + self.down_bias[expert].double().numpy()
                out[token] += weight * result
        return out

    def inputs(self, tokens: int, top_k: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        x = torch.from_numpy(self.rng.standard_normal((tokens, self.hidden))).to(DEVICE, dtype)
        weights = torch.from_numpy(self.rng.uniform(0.1, 1, (tokens, top_k))).to(DEVICE, torch.float32)
        return x, routes(self.rng, tokens, self.experts, top_k), weights


@pytest.mark.parametrize(("encoding", "scales"), FORMATS)
def test_every_format(encoding: str, scales: Scales) -> None:
    """Both kernels decode the format: experts at odd places, a number of rows that fills no tile."""
    rng = np.random.default_rng(1)
    rows, cols = 20, columns_of(encoding, scales)
    gate, up = (matrices(encoding, 2, rows, cols, rng, scales) for _ in range(2))
    gate_table, up_table = tables(encoding, [gate, up], rows, cols, scales, DEVICE, [1, 0])
    x = torch.from_numpy(rng.standard_normal((3, cols))).to(DEVICE, torch.float32)
    plan = sort_assignments(torch.tensor([[0, 1], [1, 0], [1, 0]], device=DEVICE), torch.ones(3, 2, device=DEVICE), 2)
    out = poisoned(6, rows, dtype=torch.float32)
    gate_up(x, gate_table, up_table, plan.tokens, plan.offsets, everyone(2), FFNSpec(rows), out).run()
    wide = x.double().cpu().numpy()
    truth = [silu(wide @ g.values.T) * (wide @ u.values.T) for g, u in zip(gate, up, strict=True)]
    close(out, np.concatenate([truth[0], truth[1]]), TOLERANCE[torch.float32])
    (table,) = tables(encoding, [gate[:1]], rows, cols, scales, DEVICE, [0])
    out = poisoned(3, rows, dtype=torch.float32)
    linear(x, table, out).run()
    close(out, wide @ gate[0].values.T, TOLERANCE[torch.float32])


@pytest.mark.parametrize(
    ("tokens", "experts", "top_k", "hidden", "width"),
    [
        pytest.param(5, 3, 2, 40, 24, id="odd"),
        pytest.param(1, 7, 1, 16, 33, id="one-token-k1"),
        pytest.param(3, 4, 4, 33, 16, id="k-equals-experts"),
        pytest.param(37, 2, 1, 16, 16, id="several-tiles"),
    ],
)
def test_whole_layer(tokens: int, experts: int, top_k: int, hidden: int, width: int) -> None:
    layer = Layer("F32", Scales(), FFNSpec(width), hidden, experts, seed=2)
    x, ids, weights = layer.inputs(tokens, top_k, torch.float32)
    base = torch.from_numpy(layer.rng.standard_normal((tokens, hidden))).to(DEVICE, torch.float32)
    out, _ = layer.run(x, ids, weights, base)
    close(out, layer.truth(x, ids, weights) + base.double().cpu().numpy(), TOLERANCE[torch.float32])


def test_crowded_and_empty_experts() -> None:
    layer = Layer("F32", Scales(), FFNSpec(16), hidden=16, experts=5, seed=3)
    x, ids, weights = layer.inputs(35, 1, torch.float32)
    ids = torch.full_like(ids, 3)
    out, plan = layer.run(x, ids, weights)
    assert plan.offsets.tolist() == [0, 0, 0, 0, 35, 35]
    close(out, layer.truth(x, ids, weights), TOLERANCE[torch.float32])


def test_no_tokens_launch_nothing() -> None:
    layer = Layer("F32", Scales(), FFNSpec(16), hidden=16, experts=2, seed=3)
    out, _ = layer.run(*layer.inputs(0, 1, torch.float32))
    assert out.shape == (0, 16)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("encoding", ["same", "Q8_0"])
def test_half_precision(dtype: torch.dtype, encoding: str) -> None:
    name = {torch.float16: "F16", torch.bfloat16: "BF16"}[dtype] if encoding == "same" else encoding
    layer = Layer(name, Scales(), FFNSpec(32), hidden=32, experts=2, seed=4)
    x, ids, weights = layer.inputs(4, 2, dtype)
    out, _ = layer.run(x, ids, weights)
    close(out, layer.truth(x, ids, weights), TOLERANCE[dtype])


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "swigluoai"])
def test_activations_and_biases(activation: str) -> None:
    spec = FFNSpec(24, activation, limit=1.0)
    layer = Layer("F32", Scales(), spec, hidden=16, experts=2, seed=5, bias=True)
    x, ids, weights = layer.inputs(4, 2, torch.float32)
    out, _ = layer.run(3 * x, ids, weights)
    close(out, layer.truth(3 * x, ids, weights), 4e-6)


def test_experts_in_any_order_and_in_several_launches() -> None:
    """Experts run as their weights arrive; what is not there yet is neither read nor written; the bits are the same."""
    layer = Layer("Q4_0", Scales(), FFNSpec(32), hidden=32, experts=4, seed=6)
    x, ids, weights = layer.inputs(6, 2, torch.float32)
    whole, plan = layer.run(x, ids, weights)
    partial = poisoned(12, 32, dtype=torch.float32)
    inner = poisoned(12, 32, dtype=torch.float32)
    done: set[int] = set()
    for group in ([3], [2, 0], [1]):
        missing = frozenset(range(4)) - done - set(group)
        order = [3, 1, 0, 2]
        gate, up = tables("Q4_0", [layer.gate, layer.up], 32, 32, Scales(), DEVICE, order, missing)
        (matrix,) = tables("Q4_0", [layer.down], 32, 32, Scales(), DEVICE, order, missing)
        who = torch.tensor(group, dtype=torch.int32, device=DEVICE)
        rows = int(sum(plan.offsets[e + 1] - plan.offsets[e] for e in group))
        gate_up(x, gate, up, plan.tokens, plan.offsets, who, layer.spec, inner, max_rows=rows).run()
        down(inner, matrix, plan.order, plan.weights, plan.offsets, who, partial, max_rows=rows).run()
        done |= set(group)
        written = torch.isin(ids.reshape(-1), torch.tensor(sorted(done), device=DEVICE))
        assert torch.equal(~partial.isnan().any(1), written)
        assert torch.equal(~partial.isnan().all(1), written)
    out = poisoned(6, 32, dtype=torch.float32)
    combine(partial, out, 2).run()
    assert torch.equal(out, whole)


def test_row_tiles_give_the_same_bits() -> None:
    """An expert larger than a ring slot is computed tile by tile of its rows."""
    layer = Layer("F32", Scales(), FFNSpec(24), hidden=16, experts=2, seed=7)
    x, ids, weights = layer.inputs(3, 2, torch.float32)
    plan = sort_assignments(ids, weights, 2)
    whole, pieces = poisoned(6, 24, dtype=torch.float32), poisoned(6, 24, dtype=torch.float32)
    args = (plan.tokens, plan.offsets, everyone(2), layer.spec)
    gate_up(x, layer.gate_table, layer.up_table, *args, whole).run()
    for begin, end in ((0, 10), (10, 24)):
        cut = [
            [Packed(m.data[begin * 64 : end * 64], m.values[begin:end]) for m in group]
            for group in (layer.gate, layer.up)
        ]
        gate, up = tables("F32", cut, end - begin, 16, Scales(), DEVICE, [0, 1])
        gate_up(x, gate, up, *args, pieces, column0=begin).run()
    assert torch.equal(pieces, whole)


def test_alternating_gate_and_up_rows() -> None:
    """gpt-oss stores gate rows at even, up rows at odd places of one matrix: two tables with twice the row stride."""
    layer = Layer("F32", Scales(), FFNSpec(8), hidden=16, experts=2, seed=8)
    x, ids, weights = layer.inputs(3, 1, torch.float32)
    plan = sort_assignments(ids, weights, 2)
    woven = [
        torch.from_numpy(np.stack([g.values, u.values], 1).reshape(16, 16)).float()
        for g, u in zip(layer.gate, layer.up, strict=True)
    ]
    arena = torch.stack(woven).view(torch.uint8).reshape(-1).to(DEVICE)
    gate = weight_table(arena, "F32", 8, 16, [0, 1024], row_stride=128)
    up = weight_table(arena, "F32", 8, 16, [64, 1088], row_stride=128)
    expected, out = poisoned(3, 8, dtype=torch.float32), poisoned(3, 8, dtype=torch.float32)
    args = (plan.tokens, plan.offsets, everyone(2), layer.spec)
    gate_up(x, layer.gate_table, layer.up_table, *args, expected).run()
    gate_up(x, gate, up, *args, out).run()
    assert torch.equal(out, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_rows_bits_do_not_depend_on_its_batch(dtype: torch.dtype) -> None:
    layer = Layer("Q8_0", Scales(), FFNSpec(32), hidden=32, experts=3, seed=9)
    x, ids, weights = layer.inputs(40, 2, dtype)
    together, _ = layer.run(x, ids, weights)
    for row in (0, 17, 39):
        alone, _ = layer.run(x[row : row + 1], ids[row : row + 1], weights[row : row + 1])
        assert torch.equal(alone[0], together[row])
    turned, _ = layer.run(x.flip(0), ids.flip(0), weights.flip(0))
    assert torch.equal(turned.flip(0), together)


def test_linear_with_row_weights_and_bias() -> None:
    rng = np.random.default_rng(10)
    matrix = random_matrix("F32", 24, 40, rng, Scales())
    (table,) = tables("F32", [[matrix]], 24, 40, Scales(), DEVICE, [0])
    x = torch.from_numpy(rng.standard_normal((5, 40))).to(DEVICE, torch.float32)
    bias = torch.from_numpy(rng.standard_normal((1, 24))).to(DEVICE, torch.float32)
    share = torch.from_numpy(rng.uniform(0.1, 1, 5)).to(DEVICE, torch.float32)
    out = poisoned(5, 24, dtype=torch.float32)
    linear(x, table, out, bias=bias, row_weights=share).run()
    truth = (x.double() @ torch.from_numpy(matrix.values).to(DEVICE).T + bias.double()) * share.double()[:, None]
    close(out, truth.cpu().numpy(), TOLERANCE[torch.float32])
