"""What the kernels make of packed bytes, value by value: products with unit vectors show the weights themselves."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from packed_weights import FP4, Packed, random_matrix, tables

from batchgen_lite.kernels.experts.project import linear
from batchgen_lite.kernels.experts.weights import Scales

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def decoded(encoding: str, matrix: Packed, rows: int, cols: int, scales: Scales, columns: np.ndarray) -> torch.Tensor:
    """The chosen columns of the matrix as the kernel reads them: fp32 [rows, len(columns)]."""
    (table,) = tables(encoding, [[matrix]], rows, cols, scales, DEVICE, [0])
    x = torch.zeros(len(columns), cols, device=DEVICE)
    x[torch.arange(len(columns)), torch.from_numpy(columns)] = 1.0
    out = torch.full((len(columns), rows), float("nan"), device=DEVICE)
    linear(x, table, out).run()
    return out.t().cpu()


@pytest.mark.parametrize(
    ("encoding", "scales"),
    [
        ("BF16", Scales()),
        ("INT8", Scales("fp16", 64)),
        ("INT4", Scales("bf16", 32, zeros=True)),
        ("F8_E4M3", Scales("fp32", 128, 4)),
        ("MXFP4_BLOCKS", Scales("e8m0", 32)),
        ("MXFP4", Scales()),
        ("Q8_0", Scales()),
        ("Q4_0", Scales()),
        ("Q4_K", Scales()),
        ("Q6_K", Scales()),
    ],
)
def test_values_are_those_of_the_format(encoding: str, scales: Scales) -> None:
    rng = np.random.default_rng(1)
    rows, cols = 7, 512
    matrix = random_matrix(encoding, rows, cols, rng, scales)
    columns = rng.permutation(cols)[:64]
    expected = torch.from_numpy(matrix.values[:, columns]).float()
    got = decoded(encoding, matrix, rows, cols, scales, columns)
    # One unit in the last place: a card may fuse the multiplication and subtraction of Q4_K.
    torch.testing.assert_close(got, expected, rtol=1.2e-7, atol=1e-9 if encoding == "Q4_K" else 0.0)


def test_every_fp8_value_subnormals_included() -> None:
    raw = np.arange(256, dtype=np.uint8).reshape(8, 32)
    finite = np.where((raw & 0x7F) == 0x7F, 0, raw).astype(np.uint8)
    values = torch.from_numpy(finite).view(torch.float8_e4m3fn).double().numpy()
    one = np.ones((8, 1), dtype=np.float32)
    matrix = Packed(finite.tobytes(), values, one.tobytes())
    got = decoded("F8_E4M3", matrix, 8, 32, Scales("fp32", 32), np.arange(32))
    assert torch.equal(got, torch.from_numpy(values).float())
    matrix.data = raw.tobytes()
    got = decoded("F8_E4M3", matrix, 8, 32, Scales("fp32", 32), np.arange(32))
    assert got.isnan().all(1).tolist() == [row in (3, 7) for row in range(8)]  # 0x7f and 0xff show in their rows


@pytest.mark.parametrize("encoding", ["MXFP4", "MXFP4_BLOCKS"])
def test_every_fp4_value_at_scales_from_end_to_end(encoding: str) -> None:
    exponents = np.array([0, 1, 2, 100, 127, 128, 252], dtype=np.uint8)
    nibbles = np.tile(np.arange(16, dtype=np.uint8), (7, 2))
    values = FP4[nibbles] * 2.0 ** (exponents.astype(float)[:, None] - 127)
    if encoding == "MXFP4":  # low nibbles: columns 0 to 15, high nibbles: 16 to 31
        packed = nibbles[:, :16] | (nibbles[:, 16:] << 4)
        matrix = Packed(np.concatenate([exponents[:, None], packed], 1).astype(np.uint8).tobytes(), values)
    else:
        packed = nibbles[:, 0::2] | (nibbles[:, 1::2] << 4)
        matrix = Packed(packed.astype(np.uint8).tobytes(), values, exponents.tobytes())
    scales = Scales("e8m0", 32) if encoding == "MXFP4_BLOCKS" else Scales()
    got = decoded(encoding, matrix, 7, 32, scales, np.arange(32))
    assert torch.equal(got, torch.from_numpy(values).float())
