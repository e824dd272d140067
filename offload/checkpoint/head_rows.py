"""The same stretch of rows of every head, out of a matrix whose heads lie one behind the other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from batchgen_lite.offload.checkpoint.matrix import Matrix
from batchgen_lite.offload.checkpoint.stored import check_range
from batchgen_lite.offload.checkpoint.tensors import Extent


class HeadRows:
    """Rows [first, first + count) of each head of ``matrix`` [heads * group, cols], as a matrix [heads * count, cols].

    MLA's kv_b holds, per head, key rows and then value rows; its two halves are used at different moments. Row ranges
    are whole heads. Where a base matrix has a coarser step than a head, the rows around it are read along.
    """

    def __init__(self, matrix: Matrix, group: int, first: int, count: int) -> None:
        if matrix.rows % group or not 0 <= first < first + count <= group or matrix.outputs_per_row != 1:
            raise ValueError(f"rows [{first}, {first + count}) of heads of {group} in a matrix of {matrix.rows} rows")
        self.base, self._group, self._first = matrix, group, first
        self.rows = matrix.rows // group * count
        self.cols = matrix.cols
        self.row_step = self.decode_step = count
        self.outputs_per_row = 1
        self.encoding = matrix.encoding

    def extents(self, start: int, stop: int) -> tuple[Extent, ...]:
        check_range("rows of heads", start, stop, self.row_step, self.rows)
        return tuple(extent for _, span in self._spans(start, stop) for extent in self.base.extents(*span))

    def decode(
        self, parts: Sequence[torch.Tensor], span: tuple[int, int], rows: tuple[int, int], out: torch.Tensor
    ) -> None:
        check_range("rows of heads", *rows, self.decode_step, self.rows)
        at = 0
        for head, wide in self._spans(*span):
            used = len(self.base.extents(*wide))
            low = head * self.row_step
            if rows[0] <= low < rows[1]:
                self._decode_head(parts[at : at + used], head, wide, out[low - rows[0] : low - rows[0] + self.row_step])
            at += used

    def view(self, parts: Sequence[torch.Tensor], span: tuple[int, int]) -> torch.Tensor | None:
        return None

    def _decode_head(self, parts: Sequence[torch.Tensor], head: int, wide: tuple[int, int], out: torch.Tensor) -> None:
        """One head's rows, cut out of the steps of the base that hold them."""
        first = head * self._group + self._first
        low, high = self._around(first, first + self.row_step, self.base.decode_step)
        if (low, high) == (first, first + self.row_step):
            self.base.decode(parts, wide, (low, high), out)
            return
        rows = torch.empty(high - low, self.cols)
        self.base.decode(parts, wide, (low, high), rows)
        out.copy_(rows[first - low : first - low + self.row_step])

    def _spans(self, start: int, stop: int) -> Iterator[tuple[int, tuple[int, int]]]:
        """(head, base rows around its rows) for every head of rows [start, stop)."""
        for head in range(start // self.row_step, stop // self.row_step):
            first = head * self._group + self._first
            yield head, self._around(first, first + self.row_step, self.base.row_step)

    def _around(self, start: int, stop: int, step: int) -> tuple[int, int]:
        return start // step * step, min(-(-stop // step) * step, self.base.rows)
