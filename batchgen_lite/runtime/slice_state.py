"""What a slice is: spans whose attention runs together. Made on the host; a device's tables of it are its own."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass

import torch

from batchgen_lite.kernels.attention.reference import SpanRows
from batchgen_lite.runtime.primitives import ModuleCall

Steps = Generator[ModuleCall, torch.Tensor, torch.Tensor]


def moved_to_front(rows: torch.Tensor, chosen: torch.Tensor, back: int) -> torch.Tensor:
    """``rows`` [n, width], a part of a larger tensor: those of ``chosen`` int64 [m], written so many rows ``back`` from
    the first, which nobody needs any more."""
    width = rows.shape[1]
    at = rows.storage_offset() - back * rows.stride(0)
    return rows.as_strided((len(chosen), width), rows.stride(), at).copy_(rows.index_select(0, chosen))


@dataclass(frozen=True, slots=True)
class Slice:
    """``rows`` [start, stop) of the sweep's token rows. ``spans`` count their rows from the slice's first, without
    gaps; ``logit_rows``: the rows, counted alike, that want logits, of which ``logits_before`` come in earlier
    slices."""

    start: int
    stop: int
    spans: Sequence[SpanRows]
    logit_rows: Sequence[int]
    logits_before: int

    def positions(self) -> list[int]:
        """Position of every row in its sequence."""
        return [place for span in self.spans for place in range(span.start, span.start + span.count)]

    def pages(self, page_tokens: int) -> list[int]:
        """The page that each row's KV goes to."""
        return [
            span.pages[place // page_tokens]
            for span in self.spans
            for place in range(span.start, span.start + span.count)
        ]
