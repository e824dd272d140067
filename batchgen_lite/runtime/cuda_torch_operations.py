"""The sweep's maths on a card in torch: for cards and installations that the Triton kernels cannot serve.

It is the CPU's arithmetic, fp32 throughout, on the card's memory. Slower than the kernels by a pass over the widened
weights, and without their promise: the card's matrix library may round a row by how many others there are. Router and
ties are settled with the host waiting. What a run says of itself names the reason why it is used.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from batchgen_lite.kernels.dequant.scratch import decoding_on
from batchgen_lite.models.layers import Layer
from batchgen_lite.offload.tiles import Module, Tile
from batchgen_lite.runtime.cpu_operations import CpuOperations
from batchgen_lite.runtime.operations import SliceOperations
from batchgen_lite.runtime.placed_model import PlacedModel
from batchgen_lite.runtime.placement import Placement
from batchgen_lite.runtime.slice_state import Slice
from batchgen_lite.runtime.tile_source import TileSource


class CudaTorchOperations(CpuOperations):
    """Implements Operations: CpuOperations whose temporaries lie on the device, and whose counts come back from it."""

    def __init__(self, model: PlacedModel, placement: Placement, reason: str) -> None:
        """``reason``: why not the Triton kernels."""
        super().__init__(model, placement, _HostCounts(model.stream))
        self._device = model.device.torch_device
        self._reason = reason

    def slice(self, part: Slice) -> SliceOperations:
        """See Operations.slice."""
        return _OnDevice(super().slice(part), self._device)

    def module(self, kind: str, layer: int, x: torch.Tensor, tokens: int) -> torch.Tensor:
        """See Operations.module."""
        with decoding_on(self._device):
            return super().module(kind, layer, x, tokens)

    def head(self, rows: int) -> Iterator[tuple[int, torch.Tensor]]:
        """See Operations.head."""
        blocks = super().head(rows)
        while True:
            with decoding_on(self._device):
                block = next(blocks, None)
            if block is None:
                return
            yield block

    def describe(self) -> str:
        """One line for people."""
        return f"torch in float32, because {self._reason}"


class _HostCounts:
    """A stream that is told on the host which experts are wanted. Implements TileSource."""

    def __init__(self, stream: TileSource) -> None:
        self._stream = stream

    @property
    def modules(self) -> Sequence[Module]:
        return self._stream.modules

    def tiles(self, module: Module, counts: torch.Tensor | None = None) -> Iterator[tuple[Tile, list[torch.Tensor]]]:
        return self._stream.tiles(module, None if counts is None else counts.cpu())


class _OnDevice:
    """A slice whose steps make their temporaries on the device. Implements SliceOperations."""

    def __init__(self, inner: SliceOperations, device: torch.device) -> None:
        self._inner, self._device = inner, device

    def normed(self, weight: torch.Tensor) -> torch.Tensor:
        """See SliceOperations.normed."""
        with decoding_on(self._device):
            return self._inner.normed(weight)

    def add(self, delta: torch.Tensor, norm: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        """See SliceOperations.add."""
        with decoding_on(self._device):
            self._inner.add(delta, norm, bias)

    def attention(self, layer: Layer, qkv: torch.Tensor) -> torch.Tensor:
        """See SliceOperations.attention."""
        with decoding_on(self._device):
            return self._inner.attention(layer, qkv)

    def query_latent(self, layer: Layer, latent: torch.Tensor) -> torch.Tensor:
        """See SliceOperations.query_latent."""
        with decoding_on(self._device):
            return self._inner.query_latent(layer, latent)

    def latent_heads(self, layer: Layer, query: torch.Tensor, latent: torch.Tensor) -> torch.Tensor:
        """See SliceOperations.latent_heads."""
        with decoding_on(self._device):
            return self._inner.latent_heads(layer, query, latent)

    def latent_attention(self, layer: Layer, absorbed: torch.Tensor) -> torch.Tensor:
        """See SliceOperations.latent_attention."""
        with decoding_on(self._device):
            return self._inner.latent_attention(layer, absorbed)

    def latent_values(self, layer: Layer, values: torch.Tensor) -> torch.Tensor:
        """See SliceOperations.latent_values."""
        with decoding_on(self._device):
            return self._inner.latent_values(layer, values)

    def narrow(self, attended: torch.Tensor) -> torch.Tensor:
        """See SliceOperations.narrow."""
        with decoding_on(self._device):
            return self._inner.narrow(attended)

    def final(self) -> torch.Tensor:
        """See SliceOperations.final."""
        with decoding_on(self._device):
            return self._inner.final()
