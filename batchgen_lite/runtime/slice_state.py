"""What a slice holds while it runs: its spans, the index tensors made for them, and its rows of shared activations."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field

import torch

from batchgen_lite.kernels.attention.reference import AttentionPlan, SpanRows, plan_attention
from batchgen_lite.models.rope import rope_tables
from batchgen_lite.models.spec import RopeSpec
from batchgen_lite.runtime.primitives import ModuleCall

Steps = Generator[ModuleCall, torch.Tensor, torch.Tensor]


@dataclass(slots=True)
class Slice:
    """Spans whose attention runs together. ``rows`` [start, stop) of the sweep's token rows; ``logit_rows``: indices,
    relative to the slice, of the rows that want logits. Index tensors are made once and used by every layer."""

    start: int
    stop: int
    spans: Sequence[SpanRows]
    positions: torch.Tensor  # int64 [n]
    pages: torch.Tensor  # int64 [n]: the page that each token's KV goes to
    slots: torch.Tensor  # int64 [n]: and its place within the page
    logit_rows: torch.Tensor  # int64 [m]
    _plans: dict[tuple[int, int | None], AttentionPlan] = field(default_factory=dict)
    _tables: dict[RopeSpec, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    def plan(self, group: int, window: int | None) -> AttentionPlan:
        """The attention plan for ``group`` query heads per KV head within ``window``."""
        key = (group, window)
        if key not in self._plans:
            self._plans[key] = plan_attention(self.spans, group, window)
        return self._plans[key]

    def rope(self, spec: RopeSpec) -> tuple[torch.Tensor, torch.Tensor]:
        """(cos, sin) fp32 [n, rot / 2] of the slice's positions."""
        if spec not in self._tables:
            self._tables[spec] = rope_tables(spec, self.positions)
        return self._tables[spec]


@dataclass(frozen=True, slots=True)
class Rows:
    """A sweep's activations that slices share, each slice owning its rows: hidden [T, H], normed [T, H], attended
    [T, heads * value_dim]."""

    hidden: torch.Tensor
    normed: torch.Tensor
    attended: torch.Tensor
