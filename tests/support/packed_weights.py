"""Random weights in every format that the kernels decode, with their exact values: made here, not by our decoders."""

from __future__ import annotations

from dataclasses import dataclass, field

import gguf
import numpy as np
import torch

from batchgen_lite.kernels.experts.weights import Scales, WeightTable, weight_table

GGUF_TYPES = {name: getattr(gguf.GGMLQuantizationType, name) for name in ("Q8_0", "Q4_0", "Q4_K", "Q6_K", "MXFP4")}
FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


@dataclass
class Packed:
    """One matrix: its bytes, those of its companions, and its values in float64 [rows, cols]."""

    data: bytes
    values: np.ndarray
    scales: bytes = b""
    zeros: bytes = b""


def random_matrix(encoding: str, rows: int, cols: int, rng: np.random.Generator, scales: Scales) -> Packed:
    """Values of about 1 / sqrt(cols), so that products stay near 1."""
    if encoding in GGUF_TYPES:
        return _gguf(encoding, rows, cols, rng)
    if encoding in ("F32", "F16", "BF16"):
        dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[encoding]
        values = torch.from_numpy(rng.standard_normal((rows, cols)) / cols**0.5).to(dtype)
        return Packed(values.view(torch.uint8).numpy().tobytes(), values.double().numpy())
    raw = rng.integers(0, 256, (rows, cols), dtype=np.uint8)
    groups = scales.per_row(cols)
    scale_shape = (-(-rows // scales.rows), groups)
    if encoding == "MXFP4_BLOCKS":
        exponents = rng.integers(119, 124, scale_shape, dtype=np.uint8)
        return Packed(
            _pairs(raw & 15),
            FP4[raw & 15] * _spread(2.0 ** (exponents.astype(float) - 127), raw.shape, scales),
            exponents.tobytes(),
        )
    stored = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[scales.kind]
    size = {"INT8": 74.0, "INT4": 4.6, "F8_E4M3": 120.0}[encoding] * cols**0.5
    scale = torch.from_numpy(rng.uniform(0.5, 1.5, scale_shape) / size).to(stored)
    wide = _spread(scale.double().numpy(), raw.shape, scales)
    scale_bytes = scale.contiguous().view(torch.uint8).numpy().tobytes()
    if encoding == "INT8":
        return Packed(raw.tobytes(), raw.view(np.int8) * wide, scale_bytes)
    if encoding == "F8_E4M3":
        raw[(raw & 0x7F) == 0x7F] = 0x38  # NaN has no place in weights
        floats = torch.from_numpy(raw).view(torch.float8_e4m3fn).double().numpy()
        return Packed(raw.tobytes(), floats * wide, scale_bytes)
    zeros = rng.integers(0, 16, scale_shape, dtype=np.uint8) if scales.zeros else np.full(scale_shape, 8, np.uint8)
    values = ((raw & 15).astype(float) - _spread(zeros, raw.shape, scales)) * wide
    return Packed(_pairs(raw & 15), values, scale_bytes, zeros.tobytes() if scales.zeros else b"")


def _pairs(nibbles: np.ndarray) -> bytes:
    """Two columns a byte, the even one in the low nibble."""
    return (nibbles[:, 0::2] | (nibbles[:, 1::2] << 4)).astype(np.uint8).tobytes()


def _spread(per_group: np.ndarray, shape: tuple[int, int], scales: Scales) -> np.ndarray:
    """One value per element from one per group."""
    wide = np.repeat(per_group, scales.rows, axis=0)[: shape[0]]
    return np.repeat(wide, scales.group or shape[1], axis=1)[:, : shape[1]]


def _gguf(encoding: str, rows: int, cols: int, rng: np.random.Generator) -> Packed:
    kind = GGUF_TYPES[encoding]
    block, nbytes = gguf.GGML_QUANT_SIZES[kind]
    raw = rng.integers(0, 256, (rows * cols // block, nbytes), dtype=np.uint8)
    count, size = raw.shape[0], cols**0.5
    unit = {"Q8_0": 74.0, "Q4_0": 4.6, "Q4_K": 290.0, "Q6_K": 1370.0, "MXFP4": 1.0}[encoding]
    scale = (rng.uniform(0.5, 1.5, count) / (unit * size)).astype(np.float16).view(np.uint8).reshape(count, 2)
    if encoding == "MXFP4":
        raw[:, 0] = rng.integers(119, 124, count)
    elif encoding == "Q6_K":
        raw[:, -2:] = scale
    else:
        raw[:, :2] = scale
    if encoding == "Q4_K":
        raw[:, 2:4] = (rng.uniform(0.2, 0.6, count) / (30 * size)).astype(np.float16).view(np.uint8).reshape(count, 2)
    values = gguf.quants.dequantize(raw.reshape(rows, -1), kind)
    return Packed(raw.tobytes(), values.astype(np.float64))


@dataclass
class ArenaBuilder:
    """Lays matrices out in an arena in the order given, with gaps filled with 0xff (NaN in most formats)."""

    chunks: bytearray = field(default_factory=bytearray)

    def place(self, payload: bytes, alignment: int = 16, gap: int = 16) -> int:
        """The byte offset at which ``payload`` now lies."""
        self.chunks += b"\xff" * gap
        self.chunks += b"\xff" * (-len(self.chunks) % alignment)
        offset = len(self.chunks)
        self.chunks += payload
        return offset

    def tensor(self, device: torch.device) -> torch.Tensor:
        return torch.frombuffer(bytearray(self.chunks + b"\xff" * 64), dtype=torch.uint8).clone().to(device)


def tables(
    encoding: str,
    groups: list[list[Packed]],
    rows: int,
    cols: int,
    scales: Scales,
    device: torch.device,
    order: list[int],
    missing: frozenset[int] = frozenset(),
) -> list[WeightTable]:
    """One table per group of matrices (one matrix per expert), all in one arena, experts placed in ``order``."""
    arena = ArenaBuilder()
    places: list[list[tuple[int, int, int]]] = [[(-1, -1, -1)] * len(group) for group in groups]
    for expert in order:
        if expert in missing:
            continue
        for number, group in enumerate(groups):
            packed = group[expert]
            places[number][expert] = (arena.place(packed.data), arena.place(packed.scales), arena.place(packed.zeros))
    memory = arena.tensor(device)
    result = []
    for place in places:
        data, scale_offsets, zero_offsets = (list(column) for column in zip(*place, strict=True))
        needs = bool(groups[0][0].scales)
        result.append(
            weight_table(
                memory, encoding, rows, cols, data, scales=scales,
                scale_offsets=scale_offsets if needs else None,
                zero_offsets=zero_offsets if scales.zeros else None,
            )
        )  # fmt: skip
    return result
