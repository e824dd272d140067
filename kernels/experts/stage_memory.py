"""Memory that the same few matrices are made of again and again."""

from __future__ import annotations

import torch


class StageMemory:
    """``memory`` fp32 [n], seen as one matrix at a time. The view of a shape is made once: making one is a call into
    torch, between two of which another thread may take the interpreter's lock."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self._matrices: dict[tuple[int, int], torch.Tensor] = {}
        self._padded: dict[tuple[int, int, int], tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}

    def matrix(self, rows: int, cols: int) -> torch.Tensor:
        """fp32 [rows, cols], contiguous from the memory's first element on."""
        made = self._matrices.get((rows, cols))
        if made is None:
            made = self._matrices[rows, cols] = self.memory[: rows * cols].view(rows, cols)
        return made

    def padded(self, rows: int, cols: int, columns: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """fp32 [rows, ``columns``] as ``matrix`` gives it, its first ``cols`` columns, and those behind them."""
        made = self._padded.get((rows, cols, columns))
        if made is None:
            whole = self.matrix(rows, columns)
            made = self._padded[rows, cols, columns] = (whole, whole[:, :cols], whole[:, cols:])
        return made
