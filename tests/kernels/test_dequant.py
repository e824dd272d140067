"""Every packed format against the gguf package's dequantiser, bit for bit, for every bit pattern of the quants."""

from __future__ import annotations

import threading

import gguf
import numpy as np
import pytest
import torch

from batchgen_lite.errors import CheckpointError, UnsupportedError
from batchgen_lite.kernels.dequant import scratch as scratch_module
from batchgen_lite.kernels.dequant.plain import PLAIN_DTYPES
from batchgen_lite.kernels.dequant.rows import decode_rows
from batchgen_lite.kernels.dequant.sizes import (
    GROUP_ENCODINGS,
    SUPPORTED_ENCODINGS,
    block_bytes,
    block_size,
    is_supported,
    row_bytes,
)
from batchgen_lite.kernels.temporaries import kept_sizes

PACKED = [name for name in SUPPORTED_ENCODINGS if name not in PLAIN_DTYPES and name not in GROUP_ENCODINGS]


def random_packed(encoding: str, rows: int, cols: int, seed: int = 0) -> np.ndarray:
    """Random bytes, the fp16 scales included; at this many bytes infinite and NaN scales occur."""
    return np.random.default_rng(seed).integers(0, 256, (rows, row_bytes(encoding, cols)), dtype=np.uint8)


def reference(encoding: str, packed: np.ndarray) -> torch.Tensor:
    with np.errstate(all="ignore"):
        wide = gguf.dequantize(np.ascontiguousarray(packed), gguf.GGMLQuantizationType[encoding])
    return torch.from_numpy(np.ascontiguousarray(wide))


def decoded(encoding: str, packed: torch.Tensor, cols: int) -> torch.Tensor:
    out = torch.full((packed.shape[0], cols), 12345.0)
    decode_rows(encoding, packed, out)
    return out


def assert_same_bits(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal bits, signs of zeros included; of NaNs only the places count."""
    assert torch.equal(found.isnan(), expected.isnan())
    same = found.view(torch.int32) == expected.view(torch.int32)
    assert bool((same | expected.isnan()).all())


@pytest.mark.parametrize("encoding", PACKED)
def test_random_blocks(encoding: str) -> None:
    packed = random_packed(encoding, 37, 1024)
    assert_same_bits(decoded(encoding, torch.from_numpy(packed), 1024), reference(encoding, packed))


@pytest.mark.parametrize("encoding", PACKED)
@pytest.mark.parametrize("fill", [0, 255])
def test_constant_blocks(encoding: str, fill: int) -> None:
    """All zero bits: zero scales, whose zeros have signs."""
    packed = np.full((3, row_bytes(encoding, 512)), fill, dtype=np.uint8)
    assert_same_bits(decoded(encoding, torch.from_numpy(packed), 512), reference(encoding, packed))


@pytest.mark.parametrize("encoding", PACKED)
def test_zero_scales_over_random_quants(encoding: str) -> None:
    """Signs of zeros must be the reference's even where every weight is zero."""
    packed = random_packed(encoding, 5, 512).reshape(-1, block_bytes(encoding))
    at = {"Q2_K": 80, "Q3_K": 108, "Q6_K": 208}.get(encoding, 0)
    packed[:, at : at + (1 if encoding == "MXFP4" else 2)] = 0
    packed = packed.reshape(5, -1)
    assert_same_bits(decoded(encoding, torch.from_numpy(packed), 512), reference(encoding, packed))


@pytest.mark.parametrize("encoding", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "MXFP4"])
def test_weights_survive(encoding: str) -> None:
    """The reference's own quantiser, so that the values themselves are plausible, not only equal."""
    weights = np.random.default_rng(3).standard_normal((4, 256), dtype=np.float32)
    packed = gguf.quantize(weights, gguf.GGMLQuantizationType[encoding])
    out = decoded(encoding, torch.from_numpy(packed), 256)
    assert_same_bits(out, reference(encoding, packed))
    assert float((out - torch.from_numpy(weights)).abs().max()) < 0.6


@pytest.mark.parametrize("encoding", PACKED)
def test_alignment_and_strides_do_not_matter(encoding: str) -> None:
    packed = random_packed(encoding, 6, 256, seed=1)
    expected = reference(encoding, packed)
    nbytes = packed.shape[1]
    for misalign in (1, 2, 3):
        arena = torch.zeros(packed.size + 8, dtype=torch.uint8)
        moved = arena[misalign : misalign + packed.size].view(6, nbytes)
        moved.copy_(torch.from_numpy(packed))
        assert_same_bits(decoded(encoding, moved, 256), expected)
    padded = torch.zeros(6, nbytes + 5, dtype=torch.uint8)
    padded[:, 1 : 1 + nbytes] = torch.from_numpy(packed)
    assert_same_bits(decoded(encoding, padded[:, 1 : 1 + nbytes], 256), expected)
    assert_same_bits(decoded(encoding, torch.from_numpy(packed)[::2], 256), expected[::2])


@pytest.mark.parametrize("encoding", SUPPORTED_ENCODINGS)
def test_pieces_and_chunks_join_seamlessly(encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many small pieces give what one large one does, the last ones shorter."""
    packed = torch.from_numpy(random_packed(encoding, 13, 512))
    whole = decoded(encoding, packed, 512)
    monkeypatch.setattr("batchgen_lite.kernels.dequant.scratch.PIECE_ELEMENTS", 768)
    monkeypatch.setattr("batchgen_lite.kernels.dequant.rows.PIECE_ELEMENTS", 2048)
    monkeypatch.setattr("batchgen_lite.kernels.dequant.rows.CHUNK_ELEMENTS", 2048)
    assert_same_bits(decoded(encoding, packed, 512), whole)


@pytest.mark.parametrize("encoding", sorted(PLAIN_DTYPES))
def test_plain_types_are_casts(encoding: str) -> None:
    dtype = PLAIN_DTYPES[encoding]
    packed = torch.from_numpy(random_packed(encoding, 40, 96, seed=2))
    expected = packed.view(dtype).to(torch.float32)
    assert_same_bits(decoded(encoding, packed, 96), expected)
    arena = torch.zeros(packed.numel() + 8, dtype=torch.uint8)
    moved = arena[3 : 3 + packed.numel()].view(packed.shape)
    moved.copy_(packed)
    assert_same_bits(decoded(encoding, moved, 96), expected)


@pytest.mark.parametrize("special", [(), (0x7F,), (0xFF,), (0x7F, 0xFF)])
def test_every_e4m3_byte(special: tuple[int, ...]) -> None:
    """All 254 numbers in one tensor without a NaN, and again with either NaN among them."""
    numbers = [byte for byte in range(256) if byte & 0x7F != 0x7F]
    packed = torch.tensor([numbers + list(special)], dtype=torch.uint8)
    expected = packed.view(torch.float8_e4m3fn).to(torch.float32)
    assert_same_bits(decoded("F8_E4M3", packed, packed.shape[1]), expected)


def test_sizes_are_the_gguf_package_s() -> None:
    for encoding in PACKED:
        kind = gguf.GGMLQuantizationType[encoding]
        assert (block_size(encoding), block_bytes(encoding)) == gguf.GGML_QUANT_SIZES[kind]
        assert row_bytes(encoding, 3 * block_size(encoding)) == 3 * block_bytes(encoding)


def test_refusals() -> None:
    assert not is_supported("IQ1_S")
    with pytest.raises(UnsupportedError, match=r"stored as IQ1_S cannot be widened; supported encodings: .*Q6_K"):
        row_bytes("IQ1_S", 256)
    with pytest.raises(CheckpointError, match="a Q4_K row has 128 elements, not a multiple of the block size 256"):
        row_bytes("Q4_K", 128)
    with pytest.raises(ValueError, match="packed is"):
        decode_rows("Q8_0", torch.zeros(2, 33, dtype=torch.uint8), torch.zeros(2, 32))


def test_threads_do_not_share_scratch() -> None:
    packed = {name: torch.from_numpy(random_packed(name, 64, 1024, seed=5)) for name in ("Q4_1", "Q6_K")}
    expected = {name: decoded(name, data, 1024) for name, data in packed.items()}
    found: list[tuple[str, torch.Tensor]] = []

    def work(name: str) -> None:
        for _ in range(5):
            found.append((name, decoded(name, packed[name], 1024)))

    threads = [threading.Thread(target=work, args=(name,)) for name in ("Q4_1", "Q6_K")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 10
    for name, wide in found:
        assert_same_bits(wide, expected[name])


def test_scratch_stays_bounded() -> None:
    for encoding in SUPPORTED_ENCODINGS:
        decoded(encoding, torch.from_numpy(random_packed(encoding, 160, 4096)), 4096)
    kept = {slot: nbytes for slot, nbytes in kept_sizes().items() if isinstance(slot, tuple)}  # not attention's
    assert 0 < sum(kept.values()) < 12 << 20
    assert scratch_module.scratch("x", 5 << 20, torch.uint8).numel() == 5 << 20
    assert ("decoding", "x") not in kept_sizes()
