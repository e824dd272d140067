"""The KV cache's memory: pages of 64 positions for every layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from batchgen_lite.kernels.attention.quantise_reference import quantise
from batchgen_lite.kernels.launch import upload
from batchgen_lite.offload.arena import Arena
from batchgen_lite.offload.pages import PAGE_TOKENS

KV_DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "int8": torch.int8,
}
SCALE_BYTES = 4  # of an int8 position and head: one fp32 for its key, one for its value


def kv_dtype_of(wish: str, checkpoint: str) -> torch.dtype:
    """The KV cache's dtype where the user wishes for ``wish``; "auto" is the ``checkpoint``'s own."""
    return KV_DTYPES[checkpoint if wish == "auto" else wish]


@dataclass(frozen=True, slots=True)
class KVShape:
    """What one layer caches per position: ``heads`` keys of ``key_dim`` and values of ``value_dim`` channels.
    ``value_dim`` 0: the value is a part of the key (MLA's latent)."""

    heads: int
    key_dim: int
    value_dim: int

    def page_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of one page of one layer, scales of int8 included."""
        scales = (1 if self.value_dim == 0 else 2) * SCALE_BYTES if dtype == torch.int8 else 0
        return self.heads * ((self.key_dim + self.value_dim) * dtype.itemsize + scales) * PAGE_TOKENS


class KVPool:
    """Keys [P, heads, 64, key_dim] and values [P, heads, 64, value_dim] for each layer, in the KV dtype; where that is
    int8, also their scales, fp32 [P, heads, 64] (kernels/attention/quantise_reference.py).

    Memory is touched when a page is first used. Values of a page are zeroed when it is handed out: what an earlier
    owner left behind is masked, but zero times a left-over infinity would still poison the new owner.
    """

    def __init__(
        self, layers: Sequence[KVShape], pages: int, dtype: torch.dtype, memory: torch.Tensor | None = None
    ) -> None:
        """``memory`` uint8 of at least ``pool_bytes(...)``, zeroed or not, which stays its owner's; None: an arena of
        the pool's own."""
        total = pool_bytes(layers, pages, dtype)
        self.shapes = tuple(layers)
        self.pages = pages
        self.dtype = dtype
        self.page_bytes = pool_bytes(layers, 1, dtype)
        self.arena = Arena(max(1, total), huge_pages=False) if memory is None else None
        if memory is None:
            assert self.arena is not None
            memory = self.arena.tensor
        if memory.numel() < total:
            raise ValueError(f"{pages} pages of KV take {total} bytes, the memory for them has {memory.numel()}")
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        self.key_scales: list[torch.Tensor] = []
        self.value_scales: list[torch.Tensor] = []
        self._memory, self._at = memory, 0
        for shape in layers:
            self.keys.append(self._take(dtype, pages, shape.heads, PAGE_TOKENS, shape.key_dim))
            self.values.append(self._take(dtype, pages, shape.heads, PAGE_TOKENS, shape.value_dim))
            if dtype == torch.int8:
                self.key_scales.append(self._take(torch.float32, pages, shape.heads, PAGE_TOKENS))
                latent = shape.value_dim == 0
                self.value_scales.append(
                    self.key_scales[-1] if latent else self._take(torch.float32, pages, shape.heads, PAGE_TOKENS)
                )

    def _take(self, dtype: torch.dtype, *shape: int) -> torch.Tensor:
        """The next piece of the memory. Every piece is a multiple of 64 elements, so all are aligned alike."""
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        piece = self._memory[self._at : self._at + nbytes].view(dtype).view(shape)
        self._at += nbytes
        return piece

    def scales(self, layer: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """(of keys, of values) of a layer, None unless the pool is int8. With a latent cache both are the same."""
        return (self.key_scales[layer], self.value_scales[layer]) if self.key_scales else None

    def scrub(self, pages: Sequence[int]) -> None:
        """Zero what freshly reserved ``pages`` hold that could leak into a sum: values, keys of latent layers; of int8
        ones their scales, since any int8 times zero is zero."""
        if not pages:
            return
        index = upload(torch.tensor(pages), self._memory.device)
        if self.value_scales:
            for scales in self.value_scales:
                scales.index_fill_(0, index, 0)
            return
        for keys, values in zip(self.keys, self.values, strict=True):
            (values if values.shape[-1] else keys).index_fill_(0, index, 0)

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole pages, (source, destination) each, in every layer."""
        if not pairs:
            return
        source, target = (upload(torch.tensor(side), self._memory.device) for side in zip(*pairs, strict=True))
        for tensor in self.tensors():
            tensor[target] = tensor[source]

    def move(self, moves: Mapping[int, int]) -> None:
        """As ``copy``, source -> destination, one page after the other: takes no memory beside the pool."""
        for tensor in self.tensors():
            for source, target in moves.items():
                tensor[target].copy_(tensor[source])

    def ranges(self, first: int) -> list[tuple[int, int]]:
        """Bytes [start, stop) of the pool's memory that hold pages from ``first`` on, a range for each tensor."""
        found = []
        for tensor in self.tensors():
            start = tensor.data_ptr() - self._memory.data_ptr()
            found.append((start + tensor[:first].nbytes, start + tensor.nbytes))
        return found

    def write(self, layer: int, page: torch.Tensor, slot: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Store position ``slot`` [T] of ``page`` [T]: ``key`` [T, heads, key_dim], ``value`` [T, heads, value_dim]."""
        if self.key_scales:
            self.keys[layer][page, :, slot], self.key_scales[layer][page, :, slot] = quantise(key)
            if value.shape[-1]:
                self.values[layer][page, :, slot], self.value_scales[layer][page, :, slot] = quantise(value)
            return
        self.keys[layer][page, :, slot] = key.to(self.dtype)
        if value.shape[-1]:
            self.values[layer][page, :, slot] = value.to(self.dtype)

    def tensors(self) -> list[torch.Tensor]:
        """Everything a page consists of, each [P, ...], layer by layer; nothing twice and nothing empty."""
        return [tensor for layer in range(len(self.keys)) for tensor in self.layer_tensors(layer)]

    def layer_tensors(self, layer: int) -> list[torch.Tensor]:
        """Of one layer: keys, values, scales of keys, scales of values, as far as there are any of their own."""
        own = self.values[layer].shape[-1] > 0
        found = [self.keys[layer]] + ([self.values[layer]] if own else [])
        if self.key_scales:
            found += [self.key_scales[layer]] + ([self.value_scales[layer]] if own else [])
        return found

    def close(self) -> None:
        for tensors in (self.keys, self.values, self.key_scales, self.value_scales):
            tensors.clear()
        self._memory = torch.empty(0, dtype=torch.uint8)
        if self.arena is not None:
            self.arena.close()


def pool_bytes(layers: Sequence[KVShape], pages: int, dtype: torch.dtype) -> int:
    """Bytes of a KVPool."""
    return pages * sum(shape.page_bytes(dtype) for shape in layers)
