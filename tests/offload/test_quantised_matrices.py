"""Quantised safetensors layouts against transformers' dequantisers, or against packers written out from the layout."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from matrix_checks import StoredBytes, check_matrix
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from batchgen_lite.errors import CheckpointError
from batchgen_lite.offload.checkpoint.awq_matrix import AwqMatrix
from batchgen_lite.offload.checkpoint.fp8_matrix import Fp8BlockMatrix
from batchgen_lite.offload.checkpoint.gptq_matrix import GptqMatrix
from batchgen_lite.offload.checkpoint.matrices import InterleavedPair, SplitPair, tensor_slice
from batchgen_lite.offload.checkpoint.mxfp4_matrix import Mxfp4Matrix
from batchgen_lite.offload.checkpoint.packed_int_matrix import Int8Matrix, PackedIntMatrix
from batchgen_lite.offload.checkpoint.tensors import TensorInfo


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def e4m3(rows: int, cols: int, seed: int = 0) -> torch.Tensor:
    """Random E4M3 numbers, every bit pattern but NaN."""
    codes = torch.randint(0, 256, (rows, cols), generator=generator(seed), dtype=torch.uint8)
    codes[codes & 0x7F == 0x7F] = 0x30
    return codes.view(torch.float8_e4m3fn)


def fp8_by_hand(weight: torch.Tensor, scale: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    wide = weight.float()
    rows, cols = wide.shape
    for row in range(scale.shape[0]):
        for col in range(scale.shape[1]):
            r, c = slice(row * block[0], (row + 1) * block[0]), slice(col * block[1], (col + 1) * block[1])
            wide[r, c] *= scale[row, col].float()
    assert wide.shape == (rows, cols)
    return wide


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("shape", "block"), [((48, 64), (16, 32)), ((37, 50), (16, 32)), ((5, 7), (128, 128))])
def test_fp8_blocks(shape: tuple[int, int], block: tuple[int, int], dtype: torch.dtype) -> None:
    weight = e4m3(*shape)
    grid = [-(-size // by) for size, by in zip(shape, block, strict=True)]
    scale = (torch.rand(grid, generator=generator(1)) + 0.01).to(dtype)
    stored = StoredBytes()
    matrix = Fp8BlockMatrix(stored.add_tensor("w", weight), stored.add_tensor("s", scale), block)
    expected = fp8_by_hand(weight, scale, block)
    check_matrix(stored, matrix, expected, tries=25)
    if shape[0] % block[0] == 0 and shape[1] % block[1] == 0:
        theirs = Fp8Dequantize(None)._dequantize_one(weight, scale, torch.float32)
        assert torch.equal(theirs, expected)


def test_fp8_with_bare_exponents_as_scales() -> None:
    weight, exponents = e4m3(32, 64), torch.randint(110, 140, (2, 2), generator=generator(), dtype=torch.uint8)
    expected = Fp8Dequantize(None)._dequantize_one(weight, exponents, torch.float32)
    for encoding in ("U8", "F8_E8M0"):
        stored = StoredBytes()
        scale = stored.add("s", encoding, (2, 2), exponents.numpy().tobytes())
        check_matrix(stored, Fp8BlockMatrix(stored.add_tensor("w", weight), scale, (16, 32)), expected)


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_fp8_with_one_scale(shape: tuple[int, ...]) -> None:
    stored = StoredBytes()
    weight, scale = e4m3(9, 20), torch.full(shape, 0.37)
    matrix = Fp8BlockMatrix(stored.add_tensor("w", weight), stored.add_tensor("s", scale), (9, 20))
    check_matrix(stored, matrix, weight.float() * torch.tensor(0.37))


@pytest.mark.parametrize("shape", [(9,), (9, 1)])
def test_fp8_with_a_scale_per_row(shape: tuple[int, ...]) -> None:
    stored = StoredBytes()
    weight, scale = e4m3(9, 20), torch.rand(shape, generator=generator())
    matrix = Fp8BlockMatrix(stored.add_tensor("w", weight), stored.add_tensor("s", scale), (1, 20))
    check_matrix(stored, matrix, weight.float() * scale.view(9, 1))


def test_fp8_halves_that_split_a_block() -> None:
    """A fused gate/up matrix whose middle lies inside a block of rows."""
    stored = StoredBytes()
    weight, scale = e4m3(40, 32), torch.rand(3, 1, generator=generator())
    fused = Fp8BlockMatrix(stored.add_tensor("w", weight), stored.add_tensor("s", scale), (16, 32))
    check_matrix(stored, SplitPair(fused), fp8_by_hand(weight, scale, (16, 32)))


def test_mxfp4_experts() -> None:
    experts, rows, groups = 3, 10, 4
    blocks = torch.randint(0, 256, (experts, rows, groups, 16), generator=generator(), dtype=torch.uint8)
    scales = torch.randint(1, 250, (experts, rows, groups), generator=generator(1), dtype=torch.uint8)
    expected = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)  # [experts, cols, rows]
    stored = StoredBytes()
    b, s = stored.add_tensor("b", blocks), stored.add_tensor("s", scales)
    for expert in range(experts):
        matrix = Mxfp4Matrix(tensor_slice(b, expert), tensor_slice(s, expert))
        wide = expected[expert].t().contiguous()
        check_matrix(stored, matrix, wide, tries=6)
        check_matrix(stored, InterleavedPair(matrix), torch.cat([wide[0::2], wide[1::2]]), tries=6)


def test_mxfp4_smallest_and_largest_exponents() -> None:
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 16, 16).repeat(4, 1, 1)
    scales = torch.tensor([0, 1, 254, 2], dtype=torch.uint8)[:, None].expand(4, 16)
    stored = StoredBytes()
    matrix = Mxfp4Matrix(stored.add_tensor("b", blocks), stored.add_tensor("s", scales))
    table = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    codes = blocks.view(4, -1).numpy()
    values = np.stack([table[codes & 15], table[codes >> 4]], -1).reshape(4, -1)
    exact = np.ldexp(values, scales[:, :1].numpy().astype(int) - 127)
    with np.errstate(over="ignore"):
        expected = torch.from_numpy(exact.astype(np.float32))
    check_matrix(stored, matrix, expected, tries=3)


def pack_words(values: np.ndarray, bits: int, order: Sequence[int] | None = None) -> torch.Tensor:
    """int32 [..., n * bits / 32] of unsigned values [..., n]; position i of a word takes value ``order[i]``."""
    per_word = 32 // bits
    grouped = values.reshape(*values.shape[:-1], -1, per_word).astype(np.uint64)
    words = np.zeros(grouped.shape[:-1], dtype=np.uint64)
    for position in range(per_word):
        words |= grouped[..., position if order is None else order[position]] << np.uint64(bits * position)
    return torch.from_numpy(words.astype(np.uint32).view(np.int32))


def random_codes(rows: int, cols: int, groups: int, bits: int = 4) -> tuple[np.ndarray, np.ndarray, torch.Tensor]:
    """q [rows, cols], zero [rows, groups], scale fp16 [rows, groups]."""
    rng = np.random.default_rng(rows * cols + bits)
    q, zero = (rng.integers(0, 1 << bits, (rows, n)) for n in (cols, groups))
    return q, zero, torch.from_numpy(rng.random((rows, groups)).astype(np.float16) / 16)


def widen(q: np.ndarray, zero: np.ndarray, scale: torch.Tensor, group_of: np.ndarray) -> torch.Tensor:
    codes = torch.from_numpy((q - zero[:, group_of]).astype(np.float32))
    return codes * scale.float()[:, group_of]


@pytest.mark.parametrize("zero_offset", [0, 1])
@pytest.mark.parametrize("group", [8, 24, 48])
def test_gptq(zero_offset: int, group: int) -> None:
    rows, cols = 40, 48
    q, zero, scale = random_codes(rows, cols, cols // group)
    stored = StoredBytes()
    matrix = GptqMatrix(
        stored.add_tensor("qweight", pack_words(q, 4).t()),  # packed along the inputs, stored [inputs, outputs]
        stored.add_tensor("qzeros", pack_words(zero.T, 4)),
        stored.add_tensor("scales", scale.t()),
        None,
        group,
        zero_offset,
    )
    expected = widen(q, zero + zero_offset, scale, np.arange(cols) // group)
    check_matrix(stored, matrix, expected, tries=20)


@pytest.mark.parametrize("shuffled", [False, True])
def test_gptq_with_group_indices(shuffled: bool) -> None:
    rows, cols, group = 24, 64, 16
    q, zero, scale = random_codes(rows, cols, cols // group)
    order = np.arange(cols) // group
    if shuffled:
        order = np.random.default_rng(0).permutation(order)
    stored = StoredBytes()
    matrix = GptqMatrix(
        stored.add_tensor("qweight", pack_words(q, 4).t()),
        stored.add_tensor("qzeros", pack_words(zero.T, 4)),
        stored.add_tensor("scales", scale.t()),
        stored.add_tensor("g_idx", torch.from_numpy(order.astype(np.int32))),
        group,
        1,
    )
    check_matrix(stored, matrix, widen(q, zero + 1, scale, order), tries=20)


def test_gptq_group_indices_beyond_the_groups() -> None:
    q, zero, scale = random_codes(8, 16, 2)
    stored = StoredBytes()
    matrix = GptqMatrix(
        stored.add_tensor("qweight", pack_words(q, 4).t()),
        stored.add_tensor("qzeros", pack_words(zero.T, 4)),
        stored.add_tensor("scales", scale.t()),
        stored.add_tensor("g_idx", torch.full((16,), 2, dtype=torch.int32)),
        8,
        1,
    )
    parts = [stored.part(extent, 0) for extent in matrix.extents(0, 8)]
    with pytest.raises(CheckpointError, match="'g_idx' names groups 2 to 2, but there are 2"):
        matrix.decode(parts, (0, 8), (0, 8), torch.empty(8, 16))


@pytest.mark.parametrize("group", [8, 24, 48])
def test_awq(group: int) -> None:
    rows, cols = 40, 48
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    q, zero, scale = random_codes(rows, cols, cols // group)
    stored = StoredBytes()
    matrix = AwqMatrix(
        stored.add_tensor("qweight", pack_words(q.T, 4, order)),  # packed along the outputs
        stored.add_tensor("qzeros", pack_words(zero.T, 4, order)),
        stored.add_tensor("scales", scale.t()),
        group,
    )
    check_matrix(stored, matrix, widen(q, zero, scale, np.arange(cols) // group), tries=20)


@pytest.mark.parametrize("scale_dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
def test_packed_int(bits: int, symmetric: bool, scale_dtype: torch.dtype) -> None:
    rows, cols, group = 21, 64, 32
    q, zero, scale = random_codes(rows, cols, cols // group, bits)
    scale = scale.to(scale_dtype)
    stored = StoredBytes()
    padded = np.zeros((-(-rows // 8) * 8, cols // group), dtype=zero.dtype)
    padded[:rows] = zero
    words = pack_words(padded.T, bits).t()[: -(-rows * bits // 32)]
    matrix = PackedIntMatrix(
        stored.add_tensor("weight_packed", pack_words(q, bits)),
        stored.add_tensor("weight_scale", scale),
        None if symmetric else stored.add_tensor("weight_zero_point", words),
        cols,
        group,
        bits,
    )
    if symmetric:
        zero = np.full_like(zero, 1 << (bits - 1))
    check_matrix(stored, matrix, widen(q, zero, scale, np.arange(cols) // group), tries=30)
    assert matrix.encoding == f"INT{bits}"


def test_int8_with_a_scale_per_row() -> None:
    stored = StoredBytes()
    weight = torch.randint(-128, 128, (9, 30), generator=generator(), dtype=torch.int8)
    scale = torch.rand(9, 1, generator=generator()).bfloat16()
    matrix = Int8Matrix(stored.add_tensor("w", weight), stored.add_tensor("s", scale))
    check_matrix(stored, matrix, weight.float() * scale.float())


def test_large_matrices_come_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("batchgen_lite.kernels.dequant.scratch.PIECE_ELEMENTS", 700)
    test_gptq(1, 24)
    test_gptq_with_group_indices(True)
    test_awq(24)
    test_packed_int(4, False, torch.float16)
    test_mxfp4_experts()
    test_fp8_blocks((37, 50), (16, 32), torch.float32)


def test_tensors_that_do_not_fit_are_refused() -> None:
    stored = StoredBytes()

    def zeros(name: str, dtype: torch.dtype, *shape: int) -> TensorInfo:
        return stored.add_tensor(name, torch.zeros(shape, dtype=dtype))

    fp8, i32, u8 = torch.float8_e4m3fn, torch.int32, torch.uint8
    weight = zeros("w", fp8, 32, 64)
    with pytest.raises(CheckpointError, match=r"'s' is F32 \[2, 2\]; F32 or .* \[2, 1\] was expected"):
        Fp8BlockMatrix(weight, zeros("s", torch.float32, 2, 2), (16, 64))
    with pytest.raises(CheckpointError, match="'b' is BF16"):
        Fp8BlockMatrix(zeros("b", torch.bfloat16, 4, 4), zeros("s", torch.float32, 1, 1), (4, 4))
    with pytest.raises(CheckpointError, match=r"\[rows, blocks, 16\] was expected"):
        Mxfp4Matrix(zeros("b", u8, 4, 2, 15), zeros("s", u8, 4, 2))
    with pytest.raises(CheckpointError, match=r"'s' is U8 \[4, 3\]; U8 \[4, 2\] was expected"):
        Mxfp4Matrix(zeros("b", u8, 4, 2, 16), zeros("s", u8, 4, 3))
    half = torch.float16
    with pytest.raises(CheckpointError, match=r"'z' is I32 \[2, 2\]; I32 \[2, 1\] was expected"):
        GptqMatrix(zeros("q", i32, 2, 8), zeros("z", i32, 2, 2), zeros("s", half, 2, 8), None, 8, 1)
    with pytest.raises(CheckpointError, match="16 columns are not whole groups of 5"):
        GptqMatrix(zeros("q", i32, 2, 8), zeros("z", i32, 2, 1), zeros("s", half, 2, 8), None, 5, 1)
    with pytest.raises(CheckpointError, match="'s' is F16"):
        AwqMatrix(zeros("q", i32, 16, 1), zeros("z", i32, 2, 1), zeros("s", half, 8, 2), 8)
    with pytest.raises(CheckpointError, match="12 columns are not whole words of 8"):
        PackedIntMatrix(zeros("p", i32, 4, 2), zeros("s", half, 4, 1), None, 12, 12, 4)
