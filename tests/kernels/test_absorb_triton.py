"""Heads' own matrices (the absorbed projections of latent attention) against float64, and what is refused."""

from __future__ import annotations

import pytest
import torch

from batchgen_lite.errors import UnsupportedError
from batchgen_lite.kernels.attention.absorb import absorb
from batchgen_lite.kernels.launch import OperandError

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
STORED = {torch.float32: "F32", torch.float16: "F16"}
TOLERANCE = {torch.float32: 1e-6, torch.float16: 2e-3}


def heads_in_an_arena(weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Matrices [heads, rows, cols] at odd places of a byte arena, in falling order; (arena, offsets)."""
    step = weights[0].nbytes + 40
    arena = torch.full((step * len(weights) + 64,), 0xFF, dtype=torch.uint8)
    offsets = [24 + step * (len(weights) - 1 - head) for head in range(len(weights))]
    for matrix, at in zip(weights, offsets, strict=True):
        arena[at : at + matrix.nbytes] = matrix.contiguous().view(-1).view(torch.uint8)
    return arena.to(DEVICE), torch.tensor(offsets, dtype=torch.int64, device=DEVICE)


@pytest.mark.parametrize("dtype", STORED)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("tokens", "depth", "width"), [(1, 12, 20), (19, 40, 70)])
def test_against_float64(dtype: torch.dtype, transposed: bool, tokens: int, depth: int, width: int) -> None:
    heads = 3
    generator = torch.Generator().manual_seed(tokens)
    weights = torch.randn(heads, width, depth, generator=generator).to(dtype)
    arena, table = heads_in_an_arena(weights.transpose(1, 2) if transposed else weights)
    whole = torch.randn(tokens, heads, depth + 8, generator=generator).to(dtype).to(DEVICE)
    x = whole[:, :, :depth]  # heads with more channels than are used
    room = torch.full((tokens, heads, width + 5), float("nan"), dtype=dtype, device=DEVICE)
    absorb(x, arena, table, STORED[dtype], room[:, :, :width], transposed=transposed).run()
    expected = torch.einsum("thk,hnk->thn", x.double().cpu(), weights.double())
    assert float((room[:, :, :width].double().cpu() - expected).abs().max()) <= TOLERANCE[dtype] * 4 * depth**0.5
    assert room[:, :, width:].isnan().all()  # what is beside the result stays


def test_a_row_alone_is_the_same_row() -> None:
    weights = torch.randn(2, 24, 40, generator=torch.Generator().manual_seed(0))
    arena, table = heads_in_an_arena(weights)
    x = torch.randn(21, 2, 40, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    together, alone = torch.empty(21, 2, 24, device=DEVICE), torch.empty(1, 2, 24, device=DEVICE)
    absorb(x, arena, table, "F32", together, transposed=False).run()
    absorb(x[17:18], arena, table, "F32", alone, transposed=False).run()
    assert torch.equal(together[17], alone[0])


def test_no_tokens() -> None:
    arena, table = heads_in_an_arena(torch.ones(2, 8, 16))
    absorb(torch.empty(0, 2, 16, device=DEVICE), arena, table, "F32", torch.empty(0, 2, 8, device=DEVICE),
           transposed=False).run()  # fmt: skip


def test_refusals() -> None:
    arena, table = heads_in_an_arena(torch.ones(2, 8, 16))
    x, out = torch.ones(3, 2, 16, device=DEVICE), torch.ones(3, 2, 8, device=DEVICE)
    with pytest.raises(UnsupportedError, match="stored as Q8_0: F32, F16, BF16 are taken"):
        absorb(x, arena, table, "Q8_0", out, transposed=False)
    with pytest.raises(OperandError, match="table: shape"):
        absorb(x, arena, table[:1], "F32", out, transposed=False)
    with pytest.raises(OperandError, match="arena: 64 bytes cannot hold a head's 8 x 16 F32 matrix"):
        absorb(x, arena[:64], table, "F32", out, transposed=False)
    with pytest.raises(OperandError, match="out overlaps x"):
        absorb(x, arena, table, "F32", x[:, :, :8], transposed=False)
