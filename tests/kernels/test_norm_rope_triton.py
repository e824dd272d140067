"""RMSNorm and the q/k-norm + rope + KV-write kernels against float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from batchgen_lite.kernels.config import Config
from batchgen_lite.kernels.norm.rms import rms_norm
from batchgen_lite.kernels.rope.latent import latent_write
from batchgen_lite.kernels.rope.write import rope_write

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
NAN = float("nan")
TOLERANCE = {torch.float32: 2e-6, torch.float16: 4e-3, torch.bfloat16: 4e-2}
EPS = 1e-5


def normal(rng: np.random.Generator, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.from_numpy(rng.standard_normal(shape)).to(DEVICE, dtype)


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full(shape, NAN, dtype=dtype, device=DEVICE)


def normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = x.double()
    return wide / (wide.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * weight.double()


def close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    torch.testing.assert_close(actual.double(), expected.double(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("columns", [1, 48, 100])
def test_rms_norm(dtype: torch.dtype, columns: int) -> None:
    rng = np.random.default_rng(1)
    # Rows of a wider tensor, and more columns than a block.
    x, weight = normal(rng, 3, columns + 7, dtype=dtype)[:, :columns], normal(rng, columns, dtype=dtype)
    out = empty(3, columns, dtype=dtype)
    rms_norm(x, weight, EPS, out, config=Config(1, 1, block_n=32)).run()
    close(out, normed(x, weight), TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_residual_is_added_and_kept(dtype: torch.dtype) -> None:
    rng = np.random.default_rng(2)
    x, residual, weight = normal(rng, 2, 40), normal(rng, 2, 40, dtype=dtype), normal(rng, 40)
    total = x.double() + residual.double()
    out = empty(2, 40)
    rms_norm(x, weight, EPS, out, residual=residual, config=Config(1, 1, block_n=32)).run()
    close(residual, total, TOLERANCE[dtype])
    close(out, normed(residual, weight), TOLERANCE[torch.float32])  # the norm sees what the stream holds


def test_post_norm_adds_the_normed_output() -> None:
    rng = np.random.default_rng(3)
    x, residual, weight = normal(rng, 2, 40), normal(rng, 2, 40), normal(rng, 40)
    expected = residual.double() + normed(x, weight)
    rms_norm(x, weight, EPS, residual, residual=residual, post=True).run()  # in place on the stream
    close(residual, expected, TOLERANCE[torch.float32])


def test_norm_bits_of_a_row_do_not_depend_on_its_neighbours() -> None:
    rng = np.random.default_rng(4)
    x, weight = normal(rng, 9, 40), normal(rng, 40)
    out, alone = empty(9, 40), empty(1, 40)
    rms_norm(x, weight, EPS, out).run()
    rms_norm(x[5:6], weight, EPS, alone).run()
    assert torch.equal(alone[0], out[5])


def turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, start: int, interleaved: bool) -> torch.Tensor:
    """Rotation from the definition: pairs as complex numbers. ``x`` [T, heads, D]."""
    out = x.double().clone()
    half = cos.shape[1]
    for i in range(half):
        a, b = (start + 2 * i, start + 2 * i + 1) if interleaved else (start + i, start + half + i)
        c, s = cos[:, i, None].double(), sin[:, i, None].double()
        out[:, :, a], out[:, :, b] = (
            x[:, :, a].double() * c - x[:, :, b].double() * s,
            x[:, :, b].double() * c + x[:, :, a].double() * s,
        )
    return out


ROPES = [
    pytest.param(16, 0, False, None, id="whole-head"),
    pytest.param(8, 0, False, "head", id="partial-norm-per-head"),
    pytest.param(16, 0, True, "full", id="interleaved-norm-over-heads"),
    pytest.param(6, 10, True, None, id="last-channels"),
    pytest.param(0, 0, False, "head", id="no-rotation"),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("rotary", "start", "interleaved", "norm"), ROPES)
def test_rope_write(dtype: torch.dtype, rotary: int, start: int, interleaved: bool, norm: str | None) -> None:
    rng = np.random.default_rng(5)
    tokens, q_heads, kv_heads, depth, value_depth = 3, 3, 2, 16, 12
    qkv = normal(rng, tokens, (q_heads + kv_heads) * depth + kv_heads * value_depth, dtype=dtype)
    angles = torch.from_numpy(rng.uniform(-3, 3, (tokens, rotary // 2))).to(DEVICE)
    cos, sin = angles.cos().float(), angles.sin().float()
    shapes = {"head": (depth, depth), "full": (q_heads * depth, kv_heads * depth), None: (0, 0)}[norm]
    weights = [normal(rng, n) if n else None for n in shapes]
    slots = torch.tensor([2 * 64 + 63, 0, 4 * 64 + 5], device=DEVICE)
    keys, values = empty(5, kv_heads, 64, depth, dtype=dtype), empty(5, 3, kv_heads, 64, value_depth, dtype=dtype)[:, 1]
    q_out = empty(tokens, q_heads, depth, dtype=dtype)
    rope_write(
        qkv, cos, sin, slots, q_out, keys, values, rotary_from=start, interleaved=interleaved,
        q_weight=weights[0], k_weight=weights[1], eps=EPS,
    ).run()  # fmt: skip
    q, k, v = qkv.split([q_heads * depth, kv_heads * depth, kv_heads * value_depth], dim=1)
    parts = []
    for x, weight in ((q, weights[0]), (k, weights[1])):
        wide = x.double()
        if weight is not None and norm == "full":
            wide = normed(x, weight)
        wide = wide.view(tokens, -1, depth)
        if weight is not None and norm == "head":
            wide = normed(wide, weight)
        parts.append(turned(wide, cos, sin, start, interleaved))
    close(q_out, parts[0], TOLERANCE[dtype])
    for token, (page, place) in enumerate([(2, 63), (0, 0), (4, 5)]):
        close(keys[page, :, place], parts[1][token], TOLERANCE[dtype])
        assert torch.equal(values[page, :, place], v.reshape(tokens, kv_heads, value_depth)[token])
    assert int((~keys.isnan()).sum()) == tokens * kv_heads * depth  # nothing else was touched
    assert int((~values.isnan()).sum()) == tokens * kv_heads * value_depth


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_latent_write(dtype: torch.dtype) -> None:
    rng = np.random.default_rng(6)
    tokens, heads, rank, rope = 3, 5, 24, 8
    kv, q = normal(rng, tokens, rank + rope, dtype=dtype), normal(rng, tokens, heads, 12 + rope, dtype=dtype)
    weight = normal(rng, rank)
    angles = torch.from_numpy(rng.uniform(-3, 3, (tokens, rope // 2))).to(DEVICE)
    cos, sin = angles.cos().float(), angles.sin().float()
    keys, absorbed = empty(3, 1, 64, rank + rope, dtype=dtype), empty(tokens, heads, rank + rope, dtype=dtype)
    slots = torch.tensor([64, 2 * 64 + 1, 7], device=DEVICE)
    latent_write(
        kv, q[:, :, 12:], weight, cos, sin, slots, absorbed[:, :, rank:], keys, EPS, interleaved=True
    ).run()  # fmt: skip
    close(absorbed[:, :, rank:], turned(q[:, :, 12:], cos, sin, 0, True), TOLERANCE[dtype])
    assert bool(absorbed[:, :, :rank].isnan().all())
    for token, (page, place) in enumerate([(1, 0), (2, 1), (0, 7)]):
        close(keys[page, 0, place, :rank], normed(kv[token, :rank], weight), TOLERANCE[dtype])
        expected = turned(kv[token, None, None, rank:], cos[token, None], sin[token, None], 0, True)[0, 0]
        close(keys[page, 0, place, rank:], expected, TOLERANCE[dtype])
    assert int((~keys.isnan()).sum()) == tokens * (rank + rope)
