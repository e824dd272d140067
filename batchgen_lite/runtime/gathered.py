"""Rows gathered for an expert, and its results in their place."""

from __future__ import annotations

import torch

from batchgen_lite.runtime.cpu_ffn import by_spans


class GatheredRows:
    """Memory for the rows of one expert: what it is given, then what it makes of them. ``result`` fp32 [count, hidden]
    and ``result_spans``, the same by spans, lie where the gathered rows do, which are not needed any more by then."""

    def __init__(self, memory: torch.Tensor, count: int, hidden: int, columns: int) -> None:
        """``memory`` fp32 of at least count * columns elements."""
        whole = memory[: count * columns].view(count, columns)
        self.result = memory[: count * hidden].view(count, hidden)
        self.result_spans = by_spans(self.result)
        self._rows = whole[:, :hidden]
        self._behind = whole[:, hidden:] if columns > hidden else None
        self._spans = by_spans(whole)

    def gather(self, x: torch.Tensor, index: torch.Tensor) -> list[torch.Tensor]:
        """The rows ``index`` int64 [count] of ``x`` fp32 [T, hidden], zeros behind each: fp32 [width, columns] by
        spans."""
        torch.index_select(x, 0, index, out=self._rows)
        if self._behind is not None:
            self._behind.zero_()
        return self._spans


class Gathered:
    """Memory for gathered rows of one expert after the other; ``hidden`` floats a row, ``columns`` with what products
    want behind (expert_columns.py)."""

    def __init__(self, memory: torch.Tensor, hidden: int, columns: int) -> None:
        self._memory, self._hidden, self._columns = memory, hidden, columns
        self._rows: dict[int, GatheredRows] = {}

    def rows(self, count: int) -> GatheredRows:
        """For ``count`` rows; each number of them is cut once."""
        made = self._rows.get(count)
        if made is None:
            made = self._rows[count] = GatheredRows(self._memory, count, self._hidden, self._columns)
        return made
