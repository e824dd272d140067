"""A device's maths with KV that lies on the host: any Operations, whose slices find their pages in windows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from batchgen_lite.models.layers import Layer
from batchgen_lite.offload.kv_streamed import StreamedKV
from batchgen_lite.runtime.operations import Operations, SliceOperations
from batchgen_lite.runtime.slice_state import Slice


class StreamedOperations:
    """Implements Operations: ``operations``, which have been given ``kv.window`` for a pool."""

    def __init__(self, operations: Operations, kv: StreamedKV) -> None:
        self.dtype, self.skeleton = operations.dtype, operations.skeleton
        self._operations, self._kv = operations, kv
        self._slices = 0

    def begin(self, tokens: int) -> None:
        """See Operations.begin."""
        self._operations.begin(tokens)
        self._kv.begin()
        self._slices = 0

    def embed(self, ids: Sequence[int]) -> None:
        """See Operations.embed."""
        self._operations.embed(ids)

    def slice(self, part: Slice) -> SliceOperations:
        """See Operations.slice."""
        spans = self._kv.slice(part.spans)
        made = _StreamedSlice(self._operations.slice(replace(part, spans=spans)), self._kv, self._slices)
        self._slices += 1
        return made

    def module(self, kind: str, layer: int, x: torch.Tensor, tokens: int) -> torch.Tensor:
        """See Operations.module."""
        return self._operations.module(kind, layer, x, tokens)

    def end_half(self) -> None:
        """See Operations.end_half."""
        self._operations.end_half()

    def describe(self) -> str:
        """See Operations.describe."""
        return self._operations.describe()

    def head(self, rows: int) -> Iterator[tuple[int, torch.Tensor]]:
        """See Operations.head."""
        return self._operations.head(rows)


class _StreamedSlice:
    """Implements SliceOperations: a slice that enters its window before attention and leaves it behind."""

    def __init__(self, own: SliceOperations, kv: StreamedKV, number: int) -> None:
        self._own, self._kv, self._number = own, kv, number
        self.normed, self.add, self.narrow, self.final = own.normed, own.add, own.narrow, own.final
        self.query_latent, self.latent_values = own.query_latent, own.latent_values

    def attention(self, layer: Layer, qkv: torch.Tensor) -> torch.Tensor:
        """See SliceOperations.attention."""
        self._kv.enter(layer.index, self._number)
        out = self._own.attention(layer, qkv)
        self._kv.leave()
        return out

    def latent_heads(self, layer: Layer, query: torch.Tensor, latent: torch.Tensor) -> torch.Tensor:
        """See SliceOperations.latent_heads."""
        self._kv.enter(layer.index, self._number, first=True)
        out = self._own.latent_heads(layer, query, latent)
        self._kv.leave()
        return out

    def latent_attention(self, layer: Layer, absorbed: torch.Tensor) -> torch.Tensor:
        """See SliceOperations.latent_attention."""
        self._kv.enter(layer.index, self._number)
        out = self._own.latent_attention(layer, absorbed)
        self._kv.leave()
        return out
