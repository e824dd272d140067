"""Random matrices in every format that the kernels decode, in one arena, with the values that torch decodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from batchgen_lite.kernels.dequant.pairs import decode_grouped_int4, decode_mxfp4_pairs
from batchgen_lite.kernels.dequant.rows import decode_rows
from batchgen_lite.kernels.experts.weights import ENCODINGS, Scales, WeightTable, weight_table

PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
COMPANIONS = {
    "INT8": Scales("fp32", 0),
    "INT4": Scales("fp16", 32),
    "F8_E4M3": Scales("fp32", 128, 128),
    "MXFP4_BLOCKS": Scales("e8m0", 32),
}
HALF_AT = {"Q8_0": (0,), "Q4_0": (0,), "Q4_K": (0, 2), "Q6_K": (208,)}
"""Where fp16 scales lie in a block."""
ALIGNMENT = 256


@dataclass(frozen=True)
class Weights:
    """``values``: fp32 [rows, cols] of each matrix, on the host; ``table``: all of them on the device."""

    values: list[torch.Tensor]
    table: WeightTable
    places: tuple[list[int], list[int]]

    def alone(self) -> WeightTable:
        """A table of the first matrix only."""
        table, (data, scales) = self.table, self.places
        beside = scales[:1] if ENCODINGS[table.encoding].companions else None
        return weight_table(
            table.arena, table.encoding, table.rows, table.cols, data[:1], scales=table.scales, scale_offsets=beside
        )


def random_weights(
    encoding: str, count: int, shapes: Sequence[tuple[int, int]], device: str, seed: int = 0
) -> list[Weights]:
    """For each of ``shapes`` (rows, cols) ``count`` matrices whose values are of about 1 / sqrt(cols), all in one
    arena, as the gates, ups and downs of a layer are."""
    generator = torch.Generator().manual_seed(seed)
    made = [[_random(encoding, rows, cols, generator) for _ in range(count)] for rows, cols in shapes]
    pieces: list[torch.Tensor] = []
    places: list[tuple[list[int], list[int]]] = [([], []) for _ in shapes]
    at = 0
    for matrices, place in zip(made, places, strict=True):
        for data, beside, _ in matrices:
            for payload, where in ((data, place[0]), (beside, place[1])):
                where.append(at)
                step = -(-payload.numel() // ALIGNMENT) * ALIGNMENT
                pieces.append(torch.nn.functional.pad(payload, (0, step - payload.numel()), value=0xFF))
                at += step
    arena = torch.cat(pieces).to(device)
    scales = COMPANIONS.get(encoding, Scales())
    found = []
    for (rows, cols), matrices, (data_at, beside_at) in zip(shapes, made, places, strict=True):
        table = weight_table(
            arena, encoding, rows, cols, data_at, scales=scales,
            scale_offsets=beside_at if encoding in COMPANIONS else None,
        )  # fmt: skip
        found.append(Weights([values for _, _, values in matrices], table, (data_at, beside_at)))
    return found


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _random(
    encoding: str, rows: int, cols: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(data, companions, values) of one matrix."""
    nothing = torch.empty(0, dtype=torch.uint8)
    values = torch.empty(rows, cols)
    if encoding in PLAIN:
        stored = (torch.randn(rows, cols, generator=generator) / cols**0.5).to(PLAIN[encoding])
        return _bytes(stored), nothing, stored.float()
    scheme = ENCODINGS[encoding]
    raw = torch.randint(0, 256, (rows, cols // scheme.block * scheme.block_bytes), generator=generator)
    raw = raw.to(torch.uint8)
    if scheme.companions:
        beside = _companions(encoding, raw, rows, cols, values, generator)
        return _bytes(raw), beside, values
    blocks = raw.view(-1, scheme.block_bytes)
    if encoding == "MXFP4":
        blocks[:, 0] = torch.randint(119, 124, (len(blocks),), generator=generator).to(torch.uint8)
    for number, at in enumerate(HALF_AT.get(encoding, ())):
        unit = {"Q8_0": 74.0, "Q4_0": 4.6, "Q4_K": 290.0, "Q6_K": 1370.0}[encoding] / (1 + 9 * number)
        scale = ((0.5 + torch.rand(len(blocks), generator=generator)) / (unit * cols**0.5)).half()
        blocks[:, at : at + 2] = scale.view(torch.uint8).view(-1, 2)
    decode_rows(encoding, raw, values)
    return _bytes(raw), nothing, values


def _companions(
    encoding: str, raw: torch.Tensor, rows: int, cols: int, values: torch.Tensor, generator: torch.Generator
) -> torch.Tensor:
    """Scales of ``raw``; fills ``values``."""
    scales = COMPANIONS[encoding]
    shape = (-(-rows // scales.rows), scales.per_row(cols))
    if encoding == "MXFP4_BLOCKS":
        exponents = torch.randint(119, 124, shape, generator=generator).to(torch.uint8)
        decode_mxfp4_pairs(raw, exponents, values)
        return _bytes(exponents)
    size = {"INT8": 74.0, "INT4": 4.6, "F8_E4M3": 120.0}[encoding] * cols**0.5
    factor = (0.5 + torch.rand(shape, generator=generator)) / size
    if encoding == "INT4":
        decode_grouped_int4(raw, factor.half().float(), None, values)
        return _bytes(factor.half())
    spread = factor.repeat_interleave(scales.rows, 0)[:rows].repeat_interleave(scales.group or cols, 1)[:, :cols]
    if encoding == "INT8":
        values.copy_(raw.view(torch.int8).float() * spread)
    else:
        raw[(raw & 0x7F) == 0x7F] = 0x38  # NaN has no place in weights
        values.copy_(raw.view(torch.float8_e4m3fn).float() * spread)
    return _bytes(factor)
