"""The sweep's maths on a card, by our Triton kernels: weights stay packed until they are in registers.

Activations have the card's 16-bit type (fp32 for fp32 checkpoints), sums and the residual stream are fp32. No kernel's
block sizes depend on how many tokens there are, and nothing is added atomically, so that a row's bits depend on its own
tokens, the model, the types and the card alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from batchgen_lite.kernels.padding import padded
from batchgen_lite.runtime.device_transfers import Transfers
from batchgen_lite.runtime.operations import SliceOperations
from batchgen_lite.runtime.placed_model import PlacedModel
from batchgen_lite.runtime.slice_state import Slice
from batchgen_lite.runtime.triton_modules import TritonModules
from batchgen_lite.runtime.triton_slices import TritonSlice


class TritonOperations:
    """Implements Operations. ``skeleton``: vectors on the device, fp32. The workspace holds, in this order: scratch for
    widening, normed rows, hidden rows, then what a half of a layer needs; the head takes over everything behind the
    first normed rows, which are its input."""

    def __init__(self, model: PlacedModel, transfers: Transfers, dtype: torch.dtype) -> None:
        self.spec, self.skeleton, self.kv, self.workspace = model.spec, model.skeleton, model.kv, model.workspace
        self.dtype = dtype
        self.query_dtype = dtype if self.kv.dtype == torch.int8 else self.kv.dtype
        self.hidden = self.normed = torch.empty(0)  # [T, H], fp32 and dtype
        self._embedding, self._transfers = model.embedding, transfers
        self._modules = TritonModules(self.spec, self.skeleton, model.stream, self.workspace, transfers, dtype)
        self._shared: dict[str, torch.Tensor] = {}
        self._rows = self._mark = 0

    def begin(self, tokens: int) -> None:
        """See Operations.begin."""
        self._rows = padded(tokens)
        self._shared.clear()
        self.workspace.rewind(0)
        self._modules.begin()
        self.normed = self.take((self._rows, self.spec.hidden_size), self.dtype)
        self.hidden = self.take((self._rows, self.spec.hidden_size), torch.float32)
        self._mark = self.workspace.mark()

    def embed(self, ids: Sequence[int]) -> None:
        """See Operations.embed."""
        scale = self.spec.embedding_scale

        def fill(first: int, end: int, rows: torch.Tensor) -> None:
            self._embedding.rows(ids[first:end], rows)
            if scale != 1.0:
                rows.mul_(scale)

        self._transfers.to_device(self.hidden[: len(ids)], fill)
        self.hidden[len(ids) :].zero_()

    def slice(self, part: Slice) -> SliceOperations:
        """See Operations.slice."""
        return TritonSlice(self, part)

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Workspace of the present half."""
        return self.workspace.take(*shape, dtype=dtype)

    def shared(self, name: str, width: int, dtype: torch.dtype) -> torch.Tensor:
        """The activation ``name`` [T, width] of the present half, of which each slice owns its rows."""
        if name not in self._shared:
            self._shared[name] = self.take((self._rows, width), dtype)
        return self._shared[name]

    def module(self, kind: str, layer: int, x: torch.Tensor, tokens: int) -> torch.Tensor:
        """See Operations.module."""
        return self._modules.run(kind, layer, x, tokens)

    def end_half(self) -> None:
        """See Operations.end_half."""
        self._shared.clear()
        self.workspace.rewind(self._mark)

    def head(self, rows: int) -> Iterator[tuple[int, torch.Tensor]]:
        """See Operations.head."""
        self.workspace.rewind(0)
        self._modules.begin()
        x = self.take((padded(rows), self.spec.hidden_size), self.dtype)[:rows]  # where the first normed rows lie
        logits = self._modules.head(x)
        if rows:
            yield from self._transfers.blocks(logits)

    def describe(self) -> str:
        """One line for people: the types, and what is widened because no kernel decodes it."""
        text = f"Triton kernels, activations {str(self.dtype).removeprefix('torch.')}"
        widened = self._modules.tables.widened
        return text if not widened else f"{text}; no kernel decodes {', '.join(widened)}: widened in torch first"
