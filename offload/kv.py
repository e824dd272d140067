"""The KV cache's memory: pages of 64 positions for every layer, on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from batchgen_lite.offload.arena import Arena
from batchgen_lite.offload.pages import PAGE_TOKENS

KV_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True, slots=True)
class KVShape:
    """What one layer caches per position: ``heads`` keys of ``key_dim`` and values of ``value_dim`` channels.
    ``value_dim`` 0: the value is a part of the key (MLA's latent)."""

    heads: int
    key_dim: int
    value_dim: int

    def page_bytes(self, itemsize: int) -> int:
        """Bytes of one page of one layer."""
        return self.heads * (self.key_dim + self.value_dim) * PAGE_TOKENS * itemsize


class KVPool:
    """Keys [P, heads, 64, key_dim] and values [P, heads, 64, value_dim] for each layer, in the KV dtype.

    Memory is touched when a page is first used. Values of a page are zeroed when it is handed out: what an earlier
    owner left behind is masked, but zero times a left-over infinity would still poison the new owner.
    """

    def __init__(self, layers: Sequence[KVShape], pages: int, dtype: torch.dtype) -> None:
        self.pages = pages
        self.dtype = dtype
        itemsize = dtype.itemsize
        total = sum(shape.page_bytes(itemsize) for shape in layers) * pages
        self.arena = Arena(max(1, total))
        flat = self.arena.tensor[:total].view(dtype)
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        at = 0
        for shape in layers:
            for dim, into in ((shape.key_dim, self.keys), (shape.value_dim, self.values)):
                size = pages * shape.heads * PAGE_TOKENS * dim
                into.append(flat[at : at + size].view(pages, shape.heads, PAGE_TOKENS, dim))
                at += size

    def scrub(self, pages: Sequence[int]) -> None:
        """Zero what freshly reserved ``pages`` hold that could leak into a sum (values; keys of latent layers)."""
        if not pages:
            return
        index = torch.tensor(pages)
        for keys, values in zip(self.keys, self.values, strict=True):
            (values if values.shape[-1] else keys).index_fill_(0, index, 0)

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole pages, (source, destination) each, in every layer."""
        if not pairs:
            return
        source, target = (torch.tensor(side) for side in zip(*pairs, strict=True))
        for tensor in (*self.keys, *self.values):
            tensor[target] = tensor[source]

    def write(self, layer: int, page: torch.Tensor, slot: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Store position ``slot`` [T] of ``page`` [T]: ``key`` [T, heads, key_dim], ``value`` [T, heads, value_dim]."""
        self.keys[layer][page, :, slot] = key.to(self.dtype)
        if value.shape[-1]:
            self.values[layer][page, :, slot] = value.to(self.dtype)

    def close(self) -> None:
        self.keys.clear()
        self.values.clear()
        self.arena.close()
