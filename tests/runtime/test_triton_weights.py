"""Tiles of every storage form through the kernels: the weights they see are those that ``decode`` widens, bit for bit.

The product with the unit matrix shows them: every output is one weight, times 1, plus zeros.
"""

from __future__ import annotations

from collections.abc import Callable

import gguf
import numpy as np
import pytest
import torch
from matrix_checks import StoredBytes

from batchgen_lite.kernels.dequant.plain import PLAIN_DTYPES
from batchgen_lite.kernels.dequant.rows import _BLOCK_DECODERS, decode_rows
from batchgen_lite.kernels.dequant.scratch import decoding_on
from batchgen_lite.kernels.dequant.sizes import row_bytes
from batchgen_lite.kernels.experts.project import linear
from batchgen_lite.offload.checkpoint.fp8_matrix import Fp8BlockMatrix
from batchgen_lite.offload.checkpoint.gptq_matrix import GptqMatrix
from batchgen_lite.offload.checkpoint.matrices import (
    ConcatMatrix,
    HeadPermutedMatrix,
    InterleavedPair,
    PairMatrix,
    SplitPair,
    TensorMatrix,
    TransposedMatrix,
)
from batchgen_lite.offload.checkpoint.matrix import Matrix
from batchgen_lite.offload.checkpoint.mxfp4_matrix import Mxfp4Matrix
from batchgen_lite.offload.checkpoint.packed_int_matrix import Int8Matrix, PackedIntMatrix
from batchgen_lite.offload.tiles import SHARED_EXPERT, Tile
from batchgen_lite.offload.workspace import Workspace
from batchgen_lite.runtime.triton_weights import TileTables, layout_of

CPU = torch.device("cpu")
Made = tuple[StoredBytes, Matrix]


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def codes(*shape: int, dtype: torch.dtype = torch.uint8, low: int = 0, high: int = 256) -> torch.Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(3)).to(dtype)


def plain(dtype: torch.dtype) -> Made:
    stored = StoredBytes()
    return stored, TensorMatrix(stored.add_tensor("w", random(24, 40, dtype=dtype)), 3, 16)


def of_gguf(kind: str, cols: int = 64) -> Made:
    stored = StoredBytes()
    packed = gguf.quantize(random(16, cols).numpy(), gguf.GGMLQuantizationType[kind])
    return stored, TensorMatrix(stored.add("w", kind, (16, cols), packed.tobytes()))


def k_quant(kind: str) -> Made:
    """Random bytes: gguf's package does not quantise to these."""
    stored = StoredBytes()
    size = {"Q4_K": 144, "Q6_K": 210}[kind]
    blocks = codes(8, size)
    scale = np.frombuffer(np.full(8, 0.01, dtype=np.float16).tobytes(), dtype=np.uint8).reshape(8, 2)
    at = {"Q4_K": 0, "Q6_K": 208}[kind]
    blocks[:, at : at + 2] = torch.from_numpy(scale.copy())
    if kind == "Q4_K":
        blocks[:, 2:4] = torch.from_numpy(scale.copy())
    return stored, TensorMatrix(stored.add("w", kind, (8, 256), blocks.numpy().tobytes()))


def stacked() -> Made:
    stored = StoredBytes()
    parts = [
        TensorMatrix(stored.add_tensor(name, random(rows, 40, dtype=dtype, seed=rows)))
        for name, rows, dtype in (("q", 12, torch.float32), ("k", 4, torch.bfloat16), ("v", 8, torch.float32))
    ]
    return stored, ConcatMatrix(parts)


def fp8(scale_dtype: torch.dtype, block: tuple[int, int] = (16, 32)) -> Made:
    stored = StoredBytes()
    bits = codes(40, 64)
    bits[bits & 0x7F == 0x7F] = 0x30
    grid = -(-40 // block[0]), -(-64 // block[1])
    scale = random(*grid, seed=2).abs().to(scale_dtype)
    return stored, Fp8BlockMatrix(
        stored.add_tensor("w", bits.view(torch.float8_e4m3fn)), stored.add_tensor("s", scale), block
    )


def fp8_bare() -> Made:
    stored = StoredBytes()
    bits, exponents = codes(32, 64) & 0x77, codes(2, 2, low=120, high=130)
    scale = stored.add("s", "F8_E8M0", (2, 2), exponents.numpy().tobytes())
    return stored, Fp8BlockMatrix(stored.add_tensor("w", bits.view(torch.float8_e4m3fn)), scale, (16, 32))


def mxfp4() -> Made:
    stored = StoredBytes()
    blocks, scales = codes(16, 2, 16), codes(16, 2, low=110, high=140)
    return stored, Mxfp4Matrix(stored.add_tensor("b", blocks), stored.add_tensor("s", scales))


def int8() -> Made:
    stored = StoredBytes()
    weight, scale = codes(16, 40).view(torch.int8), random(16, 1, dtype=torch.bfloat16).abs()
    return stored, Int8Matrix(stored.add_tensor("w", weight), stored.add_tensor("s", scale))


def packed_int(bits: int, *, zeros: bool = False) -> Made:
    stored = StoredBytes()
    words = codes(16, 64 * bits // 8).view(torch.int32)
    scale = random(16, 2, dtype=torch.float16).abs()
    zero = stored.add_tensor("z", codes(2, 8).view(torch.int32)) if zeros else None
    made = PackedIntMatrix(stored.add_tensor("w", words), stored.add_tensor("s", scale), zero, 64, 32, bits)
    return stored, made


def gptq() -> Made:
    stored = StoredBytes()
    weight, zeros = codes(8, 16 * 4).view(torch.int32), codes(2, 2 * 4).view(torch.int32)
    scale = random(2, 16, dtype=torch.float16).abs()
    made = GptqMatrix(
        stored.add_tensor("w", weight), stored.add_tensor("z", zeros), stored.add_tensor("s", scale), None, 32, 1
    )
    return stored, made


def pair(make: Callable[[], Made], wrap: Callable[[Matrix], Matrix]) -> Made:
    stored, matrix = make()
    return stored, wrap(matrix)


def two_tensors() -> Made:
    stored = StoredBytes()
    gate, up = (TensorMatrix(stored.add_tensor(name, random(16, 40, seed=ord(name)))) for name in "gu")
    return stored, PairMatrix(gate, up)


def two_encodings() -> Made:
    stored = StoredBytes()
    gate = TensorMatrix(stored.add_tensor("g", random(16, 40)))
    return stored, PairMatrix(gate, TensorMatrix(stored.add_tensor("u", random(16, 40, dtype=torch.float16))))


# what it is, and whether kernels read it as it lies
FORMS: dict[str, tuple[Callable[[], Made], bool]] = {
    "F32": (lambda: plain(torch.float32), True),
    "F16": (lambda: plain(torch.float16), True),
    "BF16": (lambda: plain(torch.bfloat16), True),
    "Q8_0": (lambda: of_gguf("Q8_0"), True),
    "Q4_0": (lambda: of_gguf("Q4_0"), True),
    "Q5_0, without a kernel": (lambda: of_gguf("Q5_0"), False),
    "Q4_K": (lambda: k_quant("Q4_K"), True),
    "Q6_K": (lambda: k_quant("Q6_K"), True),
    "stacked rows of two types": (stacked, True),
    "fp8 blocks": (lambda: fp8(torch.float32), True),
    "fp8 blocks, bf16 scales": (lambda: fp8(torch.bfloat16), True),
    "fp8, a scale a row": (lambda: fp8(torch.float32, (1, 64)), True),
    "fp8, one scale": (lambda: fp8(torch.float32, (40, 64)), True),
    "fp8 blocks of an odd width": (lambda: fp8(torch.float32, (16, 24)), False),
    "fp8 with bare exponents": (fp8_bare, False),
    "MXFP4 blocks": (mxfp4, True),
    "int8, a scale a row": (int8, True),
    "int4 groups": (lambda: packed_int(4), True),
    "int4 groups with zero points": (lambda: packed_int(4, zeros=True), False),
    "int8 groups": (lambda: packed_int(8), False),
    "GPTQ": (gptq, False),
    "stored transposed": (lambda: pair(lambda: plain(torch.float32), TransposedMatrix), False),
    "permuted heads": (lambda: pair(lambda: plain(torch.float32), lambda m: HeadPermutedMatrix(m, 8)), False),
    "two tensors as a pair": (two_tensors, True),
    "a pair of two types": (two_encodings, False),
    "a pair in one tensor": (lambda: pair(lambda: plain(torch.float16), SplitPair), True),
    "alternating pair": (lambda: pair(lambda: plain(torch.bfloat16), InterleavedPair), True),
    "alternating pair of MXFP4 blocks": (lambda: pair(mxfp4, InterleavedPair), True),
    "alternating pair of int4 groups": (lambda: pair(lambda: packed_int(4), InterleavedPair), True),
    "a pair in one fp8 tensor, cut inside a block": (lambda: pair(lambda: fp8(torch.float32), SplitPair), False),
}


def placed(stored: StoredBytes, tile: Tile) -> list[torch.Tensor]:
    """The tile's parts in one piece of memory, as a ring on a device holds them."""
    arena = torch.full((4096 + sum(-(-extent.nbytes // 256) * 256 for extent in tile.extents),), 0xFF).to(torch.uint8)
    parts, at = [], 256
    for extent in tile.extents:
        parts.append(arena[at : at + extent.nbytes])
        parts[-1].copy_(stored.part(extent, 0))
        at += -(-extent.nbytes // 256) * 256
    return parts


def spans(matrix: Matrix) -> list[tuple[int, int]]:
    step, rows = matrix.row_step, matrix.rows
    inner = (step, min(rows, step * max(2, rows // step - 1)))
    return [(0, rows)] if inner[0] >= inner[1] else [(0, rows), inner]


def weights_seen(stored: StoredBytes, matrix: Matrix, span: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """[outputs, rows, cols] of the span: as the kernels read it, and as ``decode`` widens it."""
    role = "linear" if matrix.outputs_per_row == 1 else "gate_up"
    tile = Tile(0, role, matrix, *span, SHARED_EXPERT, matrix.extents(*span))
    parts = placed(stored, tile)
    workspace = Workspace(1 << 20)
    tables = TileTables([tile], workspace, CPU, torch.float32)
    tables.begin()
    columns = torch.arange(0, matrix.cols, 1 if matrix.cols <= 64 else 7)  # the interpreter is slow
    seen = torch.full((matrix.outputs_per_row, len(columns), matrix.rows), float("nan"))
    for piece in tables.single(tile, parts):
        for half, table in enumerate(piece.halves):
            linear(torch.eye(matrix.cols)[columns], table, seen[half], column0=piece.first).run()
    wide = torch.empty((span[1] - span[0]) * matrix.outputs_per_row, matrix.cols)
    matrix.decode(parts, span, span, wide)
    workspace.close()
    wide = wide.view(matrix.outputs_per_row, -1, matrix.cols)[:, :, columns]
    return seen[:, :, span[0] : span[1]].transpose(1, 2), wide


@pytest.mark.parametrize("form", FORMS)
def test_kernels_see_what_decode_widens(form: str) -> None:
    make, direct = FORMS[form]
    stored, matrix = make()
    for span in spans(matrix):
        tile = Tile(0, "linear", matrix, *span, SHARED_EXPERT, matrix.extents(*span))
        if span == (0, matrix.rows):
            assert (layout_of(tile) is not None) == direct
        seen, widened = weights_seen(stored, matrix, span)
        assert torch.equal(seen, widened), float((seen - widened).abs().max())


@pytest.mark.parametrize("form", FORMS)
def test_widening_works_on_any_device(form: str) -> None:
    """Nothing of a decoder's stays on the host: on the device "meta" mixing the two is an error, and so is looking at
    values, which on a card would make the host wait."""
    stored, matrix = FORMS[form][0]()
    meta = torch.device("meta")
    parts = [torch.empty(extent.nbytes, dtype=torch.uint8, device=meta) for extent in matrix.extents(0, matrix.rows)]
    out = torch.empty(matrix.rows * matrix.outputs_per_row, matrix.cols, device=meta)
    with decoding_on(meta):
        matrix.decode(parts, (0, matrix.rows), (0, matrix.rows), out)
    assert stored.data


@pytest.mark.parametrize("encoding", [*_BLOCK_DECODERS, *PLAIN_DTYPES])
def test_every_encoding_is_widened_on_any_device(encoding: str) -> None:
    meta = torch.device("meta")
    packed = torch.empty(4, row_bytes(encoding, 512), dtype=torch.uint8, device=meta)
    with decoding_on(meta):
        decode_rows(encoding, packed, torch.empty(4, 512, device=meta))


def test_experts_that_lie_alike_share_a_launch() -> None:
    stored = StoredBytes()
    tensors = [[stored.add_tensor(f"{e}{name}", random(8, 32, seed=e)) for name in "gu"] for e in range(4)]
    pairs = [PairMatrix(TensorMatrix(gate), TensorMatrix(up)) for gate, up in tensors]
    odd = PairMatrix(*(TensorMatrix(stored.add_tensor(f"h{n}", random(8, 32, dtype=torch.float16))) for n in "gu"))
    tiles = [
        Tile(0, "gate_up", matrix, 0, 8, expert, matrix.extents(0, 8)) for expert, matrix in enumerate([*pairs, odd])
    ]
    memory = torch.zeros(1 << 16, dtype=torch.uint8)
    group, at = [], 0
    for tile in tiles:
        parts = []
        for extent in tile.extents:
            parts.append(memory[at : at + extent.nbytes])
            at += 2048
        group.append((tile, parts))
    workspace = Workspace(1 << 20)
    made = list(TileTables(tiles, workspace, CPU, torch.float32).grouped([group[3], group[1], group[4]], 5))
    assert [tables.experts for tables in made] == [(3, 1), (4,)]
    assert made[0].chosen.tolist() == [3, 1]
    assert [tuple(half.table[:, 0].tolist()) for half in made[0].halves] == [
        (0, 4096, 0, 12288, 0), (0, 6144, 0, 14336, 0),
    ]  # fmt: skip
    workspace.close()
