"""Feed-forward networks on a card, fed with tiles as they arrive: one that every token uses, and the routed experts."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from batchgen_lite.kernels.experts.combine import combine
from batchgen_lite.kernels.experts.gate_up import gate_up
from batchgen_lite.kernels.experts.project import down, linear
from batchgen_lite.kernels.launch import upload
from batchgen_lite.kernels.router.assign import Assignments
from batchgen_lite.models.layers import Layer
from batchgen_lite.models.spec import FFNSpec
from batchgen_lite.offload.tiles import SHARED_EXPERT, Tile
from batchgen_lite.offload.workspace import Workspace
from batchgen_lite.runtime.triton_weights import Loaded, Parts, TileTables


class CommonFFN:
    """A dense network or shared expert: all rows of ``x`` [T, H]. ``out`` fp32 [T, H] is complete when all its tiles
    were fed, gate_up before down. ``gate`` fp32 [T] scales its rows."""

    def __init__(
        self,
        tables: TileTables,
        workspace: Workspace,
        layer: Layer,
        spec: FFNSpec,
        x: torch.Tensor,
        gate: torch.Tensor | None = None,
    ) -> None:
        tokens, hidden = x.shape
        self._tables, self._spec, self._x, self._gate = tables, spec, x, gate
        biases = layer.ffns[SHARED_EXPERT]
        self._biases = [None if bias is None else bias.view(1, -1) for bias in (biases.gate_up, biases.down)]
        self._everyone = upload(torch.arange(tokens, dtype=torch.int32), x.device)
        self._offsets = upload(torch.tensor([0, tokens], dtype=torch.int32), x.device)
        self._inner = workspace.take(tokens, spec.intermediate, dtype=x.dtype)
        self.out = workspace.take(tokens, hidden, dtype=torch.float32)

    def feed(self, tile: Tile, parts: Parts) -> None:
        """Use one tile."""
        for tables in self._tables.single(tile, parts):
            if tile.role == "gate_up":
                gate, up = tables.halves
                gate_up(
                    self._x, gate, up, self._everyone, self._offsets, tables.chosen, self._spec, self._inner,
                    bias=self._biases[0], column0=tables.first,
                ).run()  # fmt: skip
            else:
                linear(
                    self._inner, tables.halves[0], self.out, bias=self._biases[1], row_weights=self._gate,
                    column0=tables.first,
                ).run()  # fmt: skip


class RoutedFFN:
    """The routed experts of a layer on their own tokens of ``x`` [T, H]; ``assigned`` sorts these by expert."""

    def __init__(
        self,
        tables: TileTables,
        workspace: Workspace,
        layer: Layer,
        x: torch.Tensor,
        assigned: Assignments,
        counts: Sequence[int],
        biases: tuple[torch.Tensor | None, torch.Tensor | None],
    ) -> None:
        """``counts``: tokens per expert, as the host knows them; ``biases``: of all experts [E, 2 * I] and [E, H]."""
        router, expert = layer.spec.router, layer.spec.expert
        assert router is not None
        assert expert is not None
        tokens, hidden = x.shape
        self._tables, self._x, self._assigned, self._counts = tables, x, assigned, counts
        self._spec, self._top_k, self._biases = expert, router.top_k, biases
        self._inner = workspace.take(tokens * router.top_k, expert.intermediate, dtype=x.dtype)
        self._partial = workspace.take(tokens * router.top_k, hidden, dtype=x.dtype)

    def feed(self, group: Sequence[Loaded]) -> None:
        """Use tiles of one role, in as few launches as their formats and places allow."""
        if not group:
            return
        role = group[0][0].role
        for tables in self._tables.grouped(group, len(self._counts)):
            rows = sum(self._counts[expert] for expert in tables.experts)
            if role == "gate_up":
                gate, up = tables.halves
                gate_up(
                    self._x, gate, up, self._assigned.tokens, self._assigned.offsets, tables.chosen, self._spec,
                    self._inner, bias=self._biases[0], column0=tables.first, max_rows=rows,
                ).run()  # fmt: skip
            else:
                down(
                    self._inner, tables.halves[0], self._assigned.order, self._assigned.weights,
                    self._assigned.offsets, tables.chosen, self._partial, bias=self._biases[1], column0=tables.first,
                    max_rows=rows,
                ).run()  # fmt: skip

    def add_up(self, out: torch.Tensor, base: torch.Tensor | None) -> None:
        """``out`` fp32 [T, H] = the sum of each token's experts in top-k order, and ``base``."""
        combine(self._partial, out, self._top_k, base=base).run()
