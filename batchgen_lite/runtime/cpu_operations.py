"""The sweep's maths in torch on the CPU: fp32, every tensor in the workspace or short-lived.

Its operands lie on a device that the CPU can reach into, which is the host itself or the simulated one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from batchgen_lite.kernels.padding import padded
from batchgen_lite.runtime.cpu_experts import Crew
from batchgen_lite.runtime.cpu_modules import CpuModules
from batchgen_lite.runtime.cpu_slices import CpuSlice
from batchgen_lite.runtime.expert_workers import ExpertWorkers
from batchgen_lite.runtime.operations import SliceOperations
from batchgen_lite.runtime.placed_model import PlacedModel
from batchgen_lite.runtime.placement import Placement
from batchgen_lite.runtime.slice_state import Slice
from batchgen_lite.runtime.tile_source import TileSource


class CpuOperations:
    """Implements Operations. The workspace holds, in this order: scratch for widening, normed rows, hidden rows, index
    tables where the device is separate, then what a half of a layer needs; the head takes over everything behind the
    first normed rows, which are its input."""

    dtype = torch.float32

    def __init__(
        self,
        model: PlacedModel,
        placement: Placement,
        tiles: TileSource | None = None,
        workers: ExpertWorkers | None = None,
    ) -> None:
        """``tiles``: where modules get their weights, None = the model's stream as it is; ``workers`` compute experts
        side by side, with weights from that stream; their owner closes them."""
        self.spec, self.skeleton, self.kv, self.placement = model.spec, model.skeleton, model.kv, placement
        self.hidden = self.normed = torch.empty(0)  # fp32 [T, H]
        self._embedding, self._workspace = model.embedding, model.workspace
        crew = None if workers is None else Crew(workers, model.stream)
        self._modules = CpuModules(
            model.spec, model.skeleton, tiles or model.stream, model.workspace, model.widened, crew
        )
        self._shared: dict[str, torch.Tensor] = {}
        self._rows = self._mark = 0

    def begin(self, tokens: int) -> None:
        """See Operations.begin."""
        self._rows = padded(tokens)
        self._shared.clear()
        self._workspace.rewind(0)
        self.placement.begin()
        self._modules.begin()
        self.normed = self._workspace.take(self._rows, self.spec.hidden_size)
        self.hidden = self._workspace.take(self._rows, self.spec.hidden_size)
        self._mark = self._workspace.mark()

    def embed(self, ids: Sequence[int]) -> None:
        """See Operations.embed."""
        rows = self.hidden[: len(ids)]
        if self.placement.device.separate:
            staged = self.placement.staged(len(ids), self.spec.hidden_size)
            self._embedding.rows(ids, staged)
            self.placement.fill(staged, rows)
        else:
            self._embedding.rows(ids, rows)
        if self.spec.embedding_scale != 1.0:
            rows.mul_(self.spec.embedding_scale)
        self.hidden[len(ids) :].zero_()

    def slice(self, part: Slice) -> SliceOperations:
        """See Operations.slice."""
        made = CpuSlice(self, part)
        self._mark = self._workspace.mark()  # its index tables stay for the sweep
        return made

    def shared(self, name: str, width: int) -> torch.Tensor:
        """The activation ``name`` [T, width] of the present half, of which each slice owns its rows."""
        if name not in self._shared:
            self._shared[name] = self._workspace.take(self._rows, width)
        return self._shared[name]

    def module(self, kind: str, layer: int, x: torch.Tensor, tokens: int) -> torch.Tensor:
        """See Operations.module."""
        return self._modules.run(kind, layer, x, tokens)

    def end_half(self) -> None:
        """See Operations.end_half."""
        self._shared.clear()
        self._workspace.rewind(self._mark)

    def describe(self) -> str:
        """See Operations.describe."""
        return "torch, float32"

    def head(self, rows: int) -> Iterator[tuple[int, torch.Tensor]]:
        """See Operations.head. The workspace holds all logits; on the CPU they are one block."""
        self._workspace.rewind(0)
        self._modules.begin()
        x = self._workspace.take(padded(rows), self.spec.hidden_size)  # where the first normed rows lie
        x[rows:].zero_()
        logits = self._logits(x, rows)
        if rows:
            yield from self.placement.fetch(logits)

    def _logits(self, x: torch.Tensor, rows: int) -> torch.Tensor:
        """fp32 [rows, vocab] on the device."""
        return self._modules.head(x, rows)
