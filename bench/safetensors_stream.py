"""Write safetensors shards tensor by tensor, so that a checkpoint of any size needs the memory of one tensor.

The format (https://huggingface.co/docs/safetensors): 8 bytes little-endian header length, a JSON header that gives
each tensor's dtype, shape and byte range, then the tensors' bytes. Sizes are known beforehand, so the header can be
written first.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch

DTYPE_NAMES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}


@dataclass(frozen=True, slots=True)
class Planned:
    """A tensor to be written: ``std`` and ``mean`` of its random normal values."""

    name: str
    shape: tuple[int, ...]
    std: float
    mean: float = 0.0

    def nbytes(self, dtype: torch.dtype) -> int:
        return prod(self.shape) * dtype.itemsize


def split_into_shards(tensors: Sequence[Planned], dtype: torch.dtype, limit: int) -> list[list[Planned]]:
    """Fill shards in order, each to at most ``limit`` bytes (one tensor at least)."""
    shards: list[list[Planned]] = []
    room = 0
    for tensor in tensors:
        size = tensor.nbytes(dtype)
        if not shards or size > room:
            shards.append([])
            room = limit
        shards[-1].append(tensor)
        room -= size
    return shards


def write_shard(
    path: Path, tensors: Sequence[Planned], dtype: torch.dtype, make: Callable[[Planned], torch.Tensor]
) -> None:
    """Write one shard; ``make`` is called for each tensor in order and its result dropped once written."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in tensors:
        end = offset + tensor.nbytes(dtype)
        header[tensor.name] = {
            "dtype": DTYPE_NAMES[dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)  # data starts at a multiple of 8
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little"))
        file.write(encoded)
        for tensor in tensors:
            file.write(make(tensor).contiguous().view(torch.uint8).numpy().data)
