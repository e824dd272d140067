"""Rounding to groups, and the decoders of the blocks that only packed models have."""

from __future__ import annotations

import math

import gguf
import numpy as np
import pytest
import torch

from batchgen_lite.errors import CheckpointError, UsageError
from batchgen_lite.kernels.dequant.rows import decode_rows
from batchgen_lite.kernels.dequant.sizes import GROUP_ENCODINGS, block_bytes, block_size, row_bytes
from batchgen_lite.pack.quantise import encoding_for, quantise_rows

SETTINGS = [(bits, group, zeros) for bits in (4, 8) for group in (32, 64) for zeros in (False, True)]


def reference(encoding: str, packed: np.ndarray) -> np.ndarray:
    """Decode by the published layout, number by number."""
    group, nbytes = block_size(encoding), block_bytes(encoding)
    blocks = packed.reshape(-1, nbytes)
    minimum = "M" in encoding
    start = 4 if minimum else 2
    scales = blocks[:, :start].copy().view(np.float16).astype(np.float32)
    codes = blocks[:, start:]
    if encoding.startswith("I4"):
        codes = np.concatenate([codes & 15, codes >> 4], 1).astype(np.float32) - (0 if minimum else 8)
    else:
        codes = (codes if minimum else codes.view(np.int8)).astype(np.float32)
    assert codes.shape[1] == group
    with np.errstate(all="ignore"):
        wide = codes * scales[:, :1]
        return (wide + scales[:, 1:] if minimum else wide).reshape(len(packed), -1)


def decoded(encoding: str, packed: torch.Tensor) -> torch.Tensor:
    cols = packed.shape[1] // block_bytes(encoding) * block_size(encoding)
    out = torch.full((packed.shape[0], cols), 12345.0)
    decode_rows(encoding, packed, out)
    return out


@pytest.mark.parametrize("encoding", GROUP_ENCODINGS)
def test_decoders_follow_the_layout(encoding: str) -> None:
    raw = np.random.default_rng(0).integers(0, 256, (37, row_bytes(encoding, 512)), dtype=np.uint8)
    expected = torch.from_numpy(reference(encoding, raw))
    found = decoded(encoding, torch.from_numpy(raw))
    assert torch.equal(found.isnan(), expected.isnan())
    assert bool(((found.view(torch.int32) == expected.view(torch.int32)) | expected.isnan()).all())


@pytest.mark.parametrize("encoding", GROUP_ENCODINGS)
def test_decoders_take_any_alignment_and_stride(encoding: str) -> None:
    raw = torch.from_numpy(np.random.default_rng(1).integers(0, 60, (6, row_bytes(encoding, 128)), dtype=np.uint8))
    expected = decoded(encoding, raw)
    for misalign in (1, 2, 3):
        arena = torch.zeros(raw.numel() + 8, dtype=torch.uint8)
        moved = arena[misalign : misalign + raw.numel()].view(raw.shape)
        moved.copy_(raw)
        assert torch.equal(decoded(encoding, moved), expected)
    assert torch.equal(decoded(encoding, raw[::2]), expected[::2])


@pytest.mark.parametrize(("bits", "group", "zeros"), SETTINGS)
def test_every_weight_gets_the_nearest_value_of_its_group(bits: int, group: int, zeros: bool) -> None:
    encoding = encoding_for(bits, group, zeros)
    weights = torch.randn(5, 4 * group, generator=torch.Generator().manual_seed(bits)) + (0.5 if zeros else 0.0)
    packed = quantise_rows(encoding, weights, "w")
    assert packed.shape == (5, row_bytes(encoding, 4 * group))
    blocks = packed.view(-1, block_bytes(encoding))
    values = blocks[:, : 4 if zeros else 2].contiguous().view(torch.float16).float()
    low, high = (0, 2**bits) if zeros else (-(2 ** (bits - 1)), 2 ** (bits - 1))
    grid = torch.arange(low, high).float() * values[:, :1] + (values[:, 1:] if zeros else 0.0)  # [blocks, codes]
    flat = weights.view(-1, group)
    nearest = (flat[:, :, None] - grid[:, None, :]).abs().amin(-1)
    error = (decoded(encoding, packed).view(-1, group) - flat).abs()
    assert float((error - nearest).max()) <= 1e-6
    assert float(error.max()) <= (1.05 if bits == 4 else 0.6) * float(values[:, 0].abs().max())  # in scales


@pytest.mark.parametrize(("bits", "group", "zeros"), SETTINGS)
def test_weights_that_lie_on_the_grid_survive_exactly(bits: int, group: int, zeros: bool) -> None:
    encoding = encoding_for(bits, group, zeros)
    low, high = (0, 2**bits - 1) if zeros else (-(2 ** (bits - 1)) if bits == 4 else -127, 2 ** (bits - 1) - 1)
    codes = torch.randint(low, high + 1, (8, group), generator=torch.Generator().manual_seed(0)).float()
    codes[:, 0], codes[:, 1] = low, high
    weights = codes * 2.0**-9 + (0.25 if zeros else 0.0)
    assert torch.equal(decoded(encoding, quantise_rows(encoding, weights, "w")), weights)


@pytest.mark.parametrize(("bits", "group", "zeros"), SETTINGS)
def test_groups_of_zeros_stay_zero(bits: int, group: int, zeros: bool) -> None:
    encoding = encoding_for(bits, group, zeros)
    assert not decoded(encoding, quantise_rows(encoding, torch.zeros(2, 2 * group), "w")).any()


@pytest.mark.parametrize(("bits", "group", "zeros"), [(4, 32, False), (4, 32, True), (8, 32, False)])
def test_the_gguf_package_reads_its_own_types(bits: int, group: int, zeros: bool) -> None:
    encoding = encoding_for(bits, group, zeros)
    packed = quantise_rows(encoding, torch.randn(4, 128, generator=torch.Generator().manual_seed(1)), "w")
    expected = gguf.dequantize(packed.numpy(), gguf.GGMLQuantizationType[encoding])
    assert torch.equal(decoded(encoding, packed), torch.from_numpy(expected))


@pytest.mark.parametrize("weight", [math.nan, math.inf, -1e9])
@pytest.mark.parametrize("encoding", ["Q4_0", "Q4_1", "I8_G64"])
def test_weights_without_a_scale_are_refused(encoding: str, weight: float) -> None:
    weights = torch.zeros(2, 64)
    weights[1, 3] = weight
    with pytest.raises(CheckpointError, match="expert 7 holds weights that are not finite, or too large"):
        quantise_rows(encoding, weights, "expert 7")


def test_settings_that_no_encoding_has() -> None:
    with pytest.raises(UsageError, match=r"4 bits in groups of 128: .* groups 32 or 64"):
        encoding_for(4, 128, False)
