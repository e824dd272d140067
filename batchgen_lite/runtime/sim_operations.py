"""The CPU's maths on the simulated device: the same arithmetic, with every operand held against the device's arena.

What is handed between operations (hidden rows, modules' inputs and results, weights, KV pages, vectors, index tables)
has to lie on the device; temporaries within one operation are torch's. Memory that is free is filled with bytes that
are NaN, so that whoever still reads it shows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from batchgen_lite.models.layers import Layer
from batchgen_lite.offload.devices.sim import POISON, SimDevice
from batchgen_lite.offload.tiles import Module, Tile
from batchgen_lite.runtime.cpu_operations import CpuOperations
from batchgen_lite.runtime.cpu_slices import CpuSlice
from batchgen_lite.runtime.placed_model import PlacedModel
from batchgen_lite.runtime.placement import Placement, vectors_of
from batchgen_lite.runtime.slice_state import Slice
from batchgen_lite.runtime.tile_source import TileSource


class SimOperations(CpuOperations):
    """Implements Operations. Raises OperandError for what lies in host memory, OrderError for what no event orders."""

    def __init__(self, model: PlacedModel, placement: Placement) -> None:
        assert isinstance(model.device, SimDevice)
        self._device = model.device
        super().__init__(model, placement, _CheckedTiles(model.stream, self._device))
        for number, vector in enumerate(vectors_of(model.skeleton)):
            self._device.inside(f"vector {number} of the model", vector)
        for number, tensor in enumerate(model.kv.tensors()):
            self._device.inside(f"KV cache, tensor {number}", tensor)

    def begin(self, tokens: int) -> None:
        """See Operations.begin."""
        self._poison(0)
        super().begin(tokens)
        self._device.inside("hidden rows", self.hidden)
        self._device.inside("normed rows", self.normed)

    def slice(self, part: Slice) -> CpuSlice:
        """See Operations.slice."""
        made = _CheckedSlice(self, part, self._device)
        self._mark = self._workspace.mark()
        return made

    def module(self, kind: str, layer: int, x: torch.Tensor, tokens: int) -> torch.Tensor:
        """See Operations.module."""
        where = f"{kind} of layer {layer}"
        self._device.computes(f"input of {where}", x)
        return self._device.computes(f"result of {where}", super().module(kind, layer, x, tokens), writes=True)

    def end_half(self) -> None:
        """See Operations.end_half."""
        super().end_half()
        self._poison(self._workspace.mark())

    def head(self, rows: int) -> Iterator[tuple[int, torch.Tensor]]:
        """See Operations.head."""
        for first, logits in super().head(rows):
            if self._device.holds(logits):
                raise AssertionError("logits have to come back to the host")
            yield first, logits

    def _logits(self, x: torch.Tensor, rows: int) -> torch.Tensor:
        self._device.computes("final rows", x)
        return self._device.computes("logits", super()._logits(x, rows), writes=True)

    def _poison(self, mark: int) -> None:
        self._workspace.memory.tensor[mark : self._workspace.peak].fill_(POISON)


class _CheckedTiles:
    """A stream whose tiles are looked at on the way. Implements TileSource."""

    def __init__(self, stream: TileSource, device: SimDevice) -> None:
        self._stream, self._device = stream, device

    @property
    def modules(self) -> Sequence[Module]:
        return self._stream.modules

    def tiles(self, module: Module, counts: torch.Tensor | None = None) -> Iterator[tuple[Tile, list[torch.Tensor]]]:
        for tile, parts in self._stream.tiles(module, counts):
            for part in parts:
                self._device.computes(f"weights of {module.kind} of layer {module.layer}", part)
            yield tile, parts


class _CheckedSlice(CpuSlice):
    """A slice whose operands and results are looked at."""

    def __init__(self, sweep: SimOperations, part: Slice, device: SimDevice) -> None:
        super().__init__(sweep, part)
        self._check = device.computes
        for name, table in self._index_tables():
            device.inside(name, table)

    def _index_tables(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from (("pages", self._pages), ("slots", self._slots), ("logit rows", self._logit_rows))
        for cos, sin in self._tables.values():
            yield from (("cosines", cos), ("sines", sin))
        for plan in self._plans.values():
            yield "order of results", plan.order
            for group in plan.groups:
                yield from (("queries", group.queries), ("positions", group.position), ("live rows", group.live))
                yield "first pages", group.first_page
                yield from (("pages of a rank", pages) for pages in group.pages)

    def normed(self, weight: torch.Tensor) -> torch.Tensor:
        """See SliceOperations.normed."""
        self._check("weight of a norm", weight)
        return self._check("normed rows", super().normed(weight))

    def add(self, delta: torch.Tensor, norm: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        """See SliceOperations.add."""
        self._check("delta", delta)
        self._check("weight of a norm", norm)
        if bias is not None:
            self._check("bias", bias)
        super().add(delta, norm, bias)

    def attention(self, layer: Layer, qkv: torch.Tensor) -> torch.Tensor:
        """See SliceOperations.attention."""
        self._check("qkv", qkv)
        return self._check("attended rows", super().attention(layer, qkv))

    def query_latent(self, layer: Layer, latent: torch.Tensor) -> torch.Tensor:
        """See SliceOperations.query_latent."""
        self._check("latent of the query", latent)
        return self._check("normed latent of the query", super().query_latent(layer, latent))

    def latent_heads(self, layer: Layer, query: torch.Tensor, latent: torch.Tensor) -> torch.Tensor:
        """See SliceOperations.latent_heads."""
        self._check("query", query)
        self._check("latent", latent)
        return self._check("plain part of the query", super().latent_heads(layer, query, latent))

    def latent_attention(self, layer: Layer, absorbed: torch.Tensor) -> torch.Tensor:
        """See SliceOperations.latent_attention."""
        self._check("absorbed query", absorbed)
        return self._check("attended latents", super().latent_attention(layer, absorbed))

    def latent_values(self, layer: Layer, values: torch.Tensor) -> torch.Tensor:
        """See SliceOperations.latent_values."""
        self._check("attended values", values)
        return self._check("attended rows", super().latent_values(layer, values))

    def narrow(self, attended: torch.Tensor) -> torch.Tensor:
        """See SliceOperations.narrow."""
        self._check("attended rows", attended)
        return self._check("attended rows that go on", super().narrow(attended))

    def final(self) -> torch.Tensor:
        """See SliceOperations.final."""
        return self._check("final rows", super().final())
