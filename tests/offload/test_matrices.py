"""Matrices over stored tensors against plain tensor code, for random spans, row ranges and alignments."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from matrix_checks import StoredBytes, check_matrix

from batchgen_lite.errors import CheckpointError, UnsupportedError
from batchgen_lite.offload.checkpoint.matrices import (
    ConcatMatrix,
    DeinterleavedVector,
    HeadPermutedMatrix,
    HeadPermutedVector,
    InterleavedPair,
    JoinedVector,
    PairMatrix,
    SplitPair,
    TensorMatrix,
    TransposedMatrix,
    read_dense,
    tensor_slice,
)
from batchgen_lite.offload.checkpoint.matrix import Matrix
from batchgen_lite.offload.checkpoint.tensors import Extent, TensorInfo

PLAIN = [torch.float32, torch.float16, torch.bfloat16]


def random_tensor(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(list(shape), generator=torch.Generator().manual_seed(seed)).to(dtype)


def quantised(stored: StoredBytes, name: str, values: torch.Tensor, kind: str) -> tuple[TensorInfo, torch.Tensor]:
    """A GGUF tensor of type ``kind`` and what the gguf package reads from it."""
    qtype = gguf.GGMLQuantizationType[kind]
    packed = gguf.quantize(values.numpy(), qtype)
    info = stored.add(name, kind, values.shape, packed.tobytes())
    return info, torch.from_numpy(np.ascontiguousarray(gguf.dequantize(packed, qtype)))


@pytest.mark.parametrize("dtype", PLAIN)
@pytest.mark.parametrize("rows", [None, 9])
def test_tensor_matrix(dtype: torch.dtype, rows: int | None) -> None:
    stored = StoredBytes()
    tensor = random_tensor(23, 17, dtype=dtype)
    matrix = TensorMatrix(stored.add_tensor("w", tensor), 0 if rows is None else 5, rows)
    wanted = tensor if rows is None else tensor[5:14]
    check_matrix(stored, matrix, wanted.float())
    assert matrix.encoding == {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}[dtype]


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1"])
def test_packed_tensor_matrix(kind: str) -> None:
    stored = StoredBytes()
    info, wanted = quantised(stored, "w", random_tensor(21, 96), kind)
    check_matrix(stored, TensorMatrix(info, 4), wanted[4:])


def test_view_shares_memory_only_for_aligned_fp32() -> None:
    stored = StoredBytes()
    tensor = random_tensor(6, 5)
    matrix = TensorMatrix(stored.add_tensor("w", tensor))
    (extent,) = matrix.extents(2, 5)
    view = matrix.view([stored.part(extent, 4)], (2, 5))
    assert view is not None
    assert torch.equal(view, tensor[2:5])
    assert matrix.view([stored.part(extent, 1)], (2, 5)) is None
    half = TensorMatrix(stored.add_tensor("h", tensor.half()))
    assert half.view([stored.part(half.extents(0, 6)[0], 0)], (0, 6)) is None


@pytest.mark.parametrize("shape", [(7,), (), (1, 7)])
def test_vectors_are_matrices_of_one_row(shape: tuple[int, ...]) -> None:
    stored = StoredBytes()
    tensor = random_tensor(*shape)
    check_matrix(stored, TensorMatrix(stored.add_tensor("v", tensor)), tensor.view(1, -1), tries=2)


def test_slices_of_stacked_tensors() -> None:
    stored = StoredBytes()
    tensor = random_tensor(4, 6, 10, dtype=torch.bfloat16)
    info = stored.add_tensor("experts", tensor)
    for index in range(4):
        check_matrix(stored, TensorMatrix(tensor_slice(info, index)), tensor[index].float(), tries=3)
    packed, wanted = quantised(stored, "packed", random_tensor(3, 5, 64), "Q4_1")
    check_matrix(stored, TensorMatrix(tensor_slice(packed, 2)), wanted[2])
    bias = stored.add_tensor("bias", tensor[:, 0])
    check_matrix(stored, TensorMatrix(tensor_slice(bias, 3)), tensor[3, :1].float(), tries=2)
    assert tensor_slice(info, 2).name == "experts[2]"
    for index in (-1, 4):
        with pytest.raises(CheckpointError, match=f"no slice {index}"):
            tensor_slice(info, index)


def test_stacked_rows_in_mixed_encodings() -> None:
    stored = StoredBytes()
    q, k = random_tensor(12, 64, dtype=torch.bfloat16), random_tensor(5, 64)
    v, v_wide = quantised(stored, "v", random_tensor(7, 64), "Q8_0")
    parts = [TensorMatrix(stored.add_tensor("q", q)), TensorMatrix(stored.add_tensor("k", k)), TensorMatrix(v)]
    matrix = ConcatMatrix(parts)
    assert matrix.encoding == "BF16+F32+Q8_0"
    check_matrix(stored, matrix, torch.cat([q.float(), k, v_wide]), tries=40)
    check_matrix(stored, ConcatMatrix(parts[1:2]), k)


def test_stacked_rows_with_steps() -> None:
    """Permuted q and k step by heads; v begins at a whole head, so the whole steps by heads."""
    stored = StoredBytes()
    q, k, v = (random_tensor(rows, 20, seed=rows) for rows in (24, 16, 13))
    parts: list[Matrix] = [
        HeadPermutedMatrix(TensorMatrix(stored.add_tensor(name, permute(tensor, 8))), 8)
        for name, tensor in (("q", q), ("k", k))
    ]
    parts.append(TensorMatrix(stored.add_tensor("v", v)))
    matrix = ConcatMatrix(parts)
    assert matrix.row_step == 8
    check_matrix(stored, matrix, torch.cat([q, k, v]), tries=30)
    # Here the stepping part begins within a step: the whole becomes one step.
    other = ConcatMatrix(parts[::-1])
    assert other.row_step == other.rows
    check_matrix(stored, other, torch.cat([v, k, q]), tries=2)


def permute(weights: torch.Tensor, head_dim: int) -> torch.Tensor:
    """What llama.cpp's converter does to q and k, written index by index."""
    stored = torch.empty_like(weights)
    half = head_dim // 2
    for row in range(weights.shape[0]):
        head, channel = divmod(row, head_dim)
        i, j = divmod(channel, half)
        stored[head * head_dim + 2 * j + i] = weights[row]
    return stored


def test_permute_is_the_converter_s() -> None:
    weights = random_tensor(24, 3)
    converter = weights.reshape(3, 2, 4, 3).swapaxes(1, 2).reshape(weights.shape)
    assert torch.equal(permute(weights, 8), converter)


@pytest.mark.parametrize("head_dim", [2, 6, 12])
def test_head_permuted_matrix(head_dim: int) -> None:
    stored = StoredBytes()
    tensor = random_tensor(24, 9)
    matrix = HeadPermutedMatrix(TensorMatrix(stored.add_tensor("q", permute(tensor, head_dim))), head_dim)
    assert matrix.row_step == head_dim
    check_matrix(stored, matrix, tensor)


def test_head_permuted_matrix_larger_than_its_scratch() -> None:
    stored = StoredBytes()
    tensor = random_tensor(512, 1000, dtype=torch.float16)
    matrix = HeadPermutedMatrix(TensorMatrix(stored.add_tensor("q", permute(tensor, 64))), 64)
    check_matrix(stored, matrix, tensor.float(), tries=4)


def test_head_permuted_vector() -> None:
    stored = StoredBytes()
    tensor = random_tensor(24)
    matrix = HeadPermutedVector(TensorMatrix(stored.add_tensor("b", permute(tensor[:, None], 6)[:, 0])), 6)
    check_matrix(stored, matrix, tensor[None], tries=2)


def test_pair_of_two_tensors() -> None:
    stored = StoredBytes()
    gate = random_tensor(11, 32, dtype=torch.float16)
    up, up_wide = quantised(stored, "up", random_tensor(11, 32, seed=1), "Q4_0")
    matrix = PairMatrix(TensorMatrix(stored.add_tensor("gate", gate)), TensorMatrix(up))
    assert matrix.outputs_per_row == 2
    assert matrix.encoding == "F16+Q4_0"
    check_matrix(stored, matrix, torch.cat([gate.float(), up_wide]))


@pytest.mark.parametrize("dtype", PLAIN)
def test_fused_pairs(dtype: torch.dtype) -> None:
    stored = StoredBytes()
    fused = random_tensor(26, 15, dtype=dtype)
    matrix = TensorMatrix(stored.add_tensor("gate_up", fused))
    check_matrix(stored, SplitPair(matrix), fused.float())
    check_matrix(stored, InterleavedPair(matrix), torch.cat([fused[0::2], fused[1::2]]).float())


@pytest.mark.parametrize("dtype", PLAIN)
def test_transposed_matrices(dtype: torch.dtype) -> None:
    stored = StoredBytes()
    tensor = random_tensor(15, 26, dtype=dtype)  # stored [cols, rows]
    info = stored.add_tensor("w", tensor)
    matrix = TransposedMatrix(info)
    assert (matrix.rows, matrix.cols, matrix.row_step, matrix.decode_step) == (26, 15, 26, 1)
    check_matrix(stored, matrix, tensor.t().contiguous().float())
    check_matrix(stored, SplitPair(matrix), tensor.t().contiguous().float())
    wide = tensor.t().float()
    check_matrix(stored, InterleavedPair(matrix), torch.cat([wide[0::2], wide[1::2]]))


def test_transposed_matrix_larger_than_its_scratch() -> None:
    stored = StoredBytes()
    tensor = random_tensor(3000, 130, dtype=torch.bfloat16)
    check_matrix(stored, TransposedMatrix(stored.add_tensor("w", tensor)), tensor.t().contiguous().float(), tries=4)


def test_transposed_packed_matrix() -> None:
    stored = StoredBytes()
    info, wide = quantised(stored, "w", random_tensor(3, 10, 64), "Q8_0")
    check_matrix(stored, TransposedMatrix(TensorMatrix(tensor_slice(info, 1))), wide[1].t().contiguous())


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1"])
def test_interleaved_pairs_of_packed_and_of_combined_rows(kind: str) -> None:
    stored = StoredBytes()
    info, wide = quantised(stored, "w", random_tensor(26, 64), kind)
    expected = torch.cat([wide[0::2], wide[1::2]])
    check_matrix(stored, InterleavedPair(TensorMatrix(info)), expected)
    # Rows of a combined matrix are widened first and sorted then.
    halves = ConcatMatrix([TensorMatrix(info, 0, 7), TensorMatrix(info, 7)])
    check_matrix(stored, InterleavedPair(halves), expected)


def test_joined_and_deinterleaved_vectors() -> None:
    stored = StoredBytes()
    vectors = [random_tensor(n, dtype=dtype, seed=n) for n, dtype in ((5, torch.float32), (8, torch.bfloat16))]
    parts = [TensorMatrix(stored.add_tensor(str(n), vector)) for n, vector in enumerate(vectors)]
    check_matrix(stored, JoinedVector(parts), torch.cat([v.float() for v in vectors])[None], tries=2)
    check_matrix(stored, JoinedVector(parts[:1]), vectors[0][None], tries=2)
    wanted = torch.cat([vectors[1][0::2], vectors[1][1::2]]).float()
    check_matrix(stored, DeinterleavedVector(parts[1]), wanted[None], tries=2)


def test_read_dense(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = StoredBytes()
    gate, up = random_tensor(40, 25), random_tensor(40, 25, seed=1)
    pair_gate = TensorMatrix(stored.add_tensor("g", gate))
    pair = PairMatrix(pair_gate, TensorMatrix(stored.add_tensor("u", up)))
    checkpoint = stored.checkpoint(tmp_path / "w")
    assert torch.equal(read_dense(checkpoint, pair), torch.cat([gate, up]))
    monkeypatch.setattr("batchgen_lite.offload.checkpoint.dense._PIECE_BYTES", 1000)
    assert torch.equal(read_dense(checkpoint, pair), torch.cat([gate, up]))
    assert torch.equal(read_dense(checkpoint, TransposedMatrix(pair_gate)), gate.t())


def test_shapes_that_do_not_fit_are_refused() -> None:
    stored = StoredBytes()
    matrix = TensorMatrix(stored.add_tensor("w", random_tensor(6, 8)))
    other = TensorMatrix(stored.add_tensor("x", random_tensor(5, 7)))
    stacked = stored.add_tensor("s", random_tensor(2, 3, 4))
    with pytest.raises(CheckpointError, match="differ in width"):
        ConcatMatrix([matrix, other])
    with pytest.raises(CheckpointError, match="gate is 6 x 8, but up is 5 x 7"):
        PairMatrix(matrix, other)
    with pytest.raises(CheckpointError, match="5 rows, an odd number"):
        InterleavedPair(other)
    with pytest.raises(CheckpointError, match="not whole heads"):
        HeadPermutedMatrix(matrix, 4)
    with pytest.raises(CheckpointError, match="a matrix was expected"):
        TensorMatrix(stacked)
    with pytest.raises(CheckpointError, match=r"no rows \[4, 7\)"):
        TensorMatrix(matrix.tensor, 4, 3)
    with pytest.raises(CheckpointError, match="a vector was expected"):
        JoinedVector([matrix])
    with pytest.raises(CheckpointError, match="takes 192 bytes, 100 are stored"):
        TensorMatrix(TensorInfo("w", "F32", (6, 8), Extent(0, 0, 100)))
    with pytest.raises(CheckpointError, match="not a multiple of the block size 32"):
        TensorMatrix(TensorInfo("w", "Q8_0", (6, 8), Extent(0, 0, 100)))
    with pytest.raises(UnsupportedError, match="stored as U8"):
        TensorMatrix(TensorInfo("w", "U8", (6, 8), Extent(0, 0, 48)))


@pytest.mark.parametrize("span", [(0, 0), (3, 2), (-1, 4), (0, 25), (0, 3), (2, 8)])
def test_row_ranges_are_whole_steps_inside_the_matrix(span: tuple[int, int]) -> None:
    stored = StoredBytes()
    matrix = HeadPermutedMatrix(TensorMatrix(stored.add_tensor("w", random_tensor(24, 8))), 8)
    with pytest.raises(ValueError, match="whole steps of 8"):
        matrix.extents(*span)
