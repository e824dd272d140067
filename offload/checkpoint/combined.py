"""Matrices made of other matrices: rows stacked, and gate/up pairs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Protocol, runtime_checkable

import torch

from batchgen_lite.errors import CheckpointError
from batchgen_lite.kernels.dequant.scratch import scratch
from batchgen_lite.offload.checkpoint.matrix import Matrix
from batchgen_lite.offload.checkpoint.stored import check_range
from batchgen_lite.offload.checkpoint.tensors import Extent

_CHUNK_ELEMENTS = 1 << 17
"""Scratch of a decoder that widens first and rearranges then: 512 KiB."""


def chunk_rows(step: int, row_elements: int) -> int:
    """Rows to widen at a time: a multiple of ``step`` with about ``_CHUNK_ELEMENTS`` elements."""
    return max(1, _CHUNK_ELEMENTS // max(1, step * row_elements)) * step


def join_names(encodings: Sequence[str]) -> str:
    """ "Q4_K+Q6_K" for a matrix of parts in different encodings."""
    return "+".join(dict.fromkeys(encodings))


@runtime_checkable
class Alternating(Protocol):
    """A matrix that widens every second row directly, which saves interleaved pairs a copy."""

    def decode_alternate(
        self, parts: Sequence[torch.Tensor], span: tuple[int, int], rows: tuple[int, int], out: torch.Tensor
    ) -> None:
        """Widen rows ``rows[0]``, ``rows[0] + 2``, ... below ``rows[1]``."""
        ...


class ConcatMatrix:
    """The rows of several matrices of equal ``cols``, one matrix below the other (fused q, k, v).

    Raises CheckpointError if the widths differ. Parts that step by more than one row must start at a multiple of the
    common step, else the whole is one step.
    """

    outputs_per_row = 1

    def __init__(self, parts: Sequence[Matrix]) -> None:
        if not parts or any(part.outputs_per_row != 1 for part in parts):
            raise ValueError("ConcatMatrix takes at least one matrix, and no pairs")
        if len({part.cols for part in parts}) != 1:
            raise CheckpointError(f"matrices to be stacked differ in width: {[part.cols for part in parts]}")
        self._parts = tuple(parts)
        self._starts = [sum(part.rows for part in parts[:i]) for i in range(len(parts))]
        self.cols = parts[0].cols
        self.rows = sum(part.rows for part in parts)
        self.row_step = self._common_step([part.row_step for part in parts])
        self.decode_step = self._common_step([part.decode_step for part in parts])
        self.encoding = join_names([part.encoding for part in parts])

    def _common_step(self, steps: list[int]) -> int:
        step = math.lcm(*steps)
        return step if all(start % step == 0 for start in self._starts) else self.rows

    def _overlaps(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """(part number, first row, last row + 1), the rows counted within the part."""
        for number, (first, part) in enumerate(zip(self._starts, self._parts, strict=True)):
            low, high = max(start - first, 0), min(stop - first, part.rows)
            if low < high:
                yield number, low, high

    def extents(self, start: int, stop: int) -> tuple[Extent, ...]:
        check_range("stacked matrix", start, stop, self.row_step, self.rows)
        return tuple(e for n, low, high in self._overlaps(start, stop) for e in self._parts[n].extents(low, high))

    def decode(
        self, parts: Sequence[torch.Tensor], span: tuple[int, int], rows: tuple[int, int], out: torch.Tensor
    ) -> None:
        at = 0
        for number, low, high in self._overlaps(*span):
            part = self._parts[number]
            count = len(part.extents(low, high))
            first = self._starts[number]
            wanted = max(rows[0] - first, low), min(rows[1] - first, high)
            if wanted[0] < wanted[1]:
                target = out[wanted[0] + first - rows[0] : wanted[1] + first - rows[0]]
                part.decode(parts[at : at + count], (low, high), wanted, target)
            at += count

    def view(self, parts: Sequence[torch.Tensor], span: tuple[int, int]) -> torch.Tensor | None:
        overlaps = list(self._overlaps(*span))
        if len(overlaps) != 1:
            return None
        number, low, high = overlaps[0]
        return self._parts[number].view(parts, (low, high))


class _Pair:
    """What gate/up pairs share: two outputs a row and no fp32 view."""

    outputs_per_row = 2
    rows: int
    cols: int
    row_step: int
    decode_step: int
    encoding: str

    def view(self, parts: Sequence[torch.Tensor], span: tuple[int, int]) -> torch.Tensor | None:
        return None


class PairMatrix(_Pair):
    """Gate and up matrices of equal shape, read and widened together: row r is gate row r and up row r.

    Raises CheckpointError if the shapes differ.
    """

    def __init__(self, gate: Matrix, up: Matrix) -> None:
        if gate.outputs_per_row != 1 or up.outputs_per_row != 1:
            raise ValueError("PairMatrix takes two matrices, not pairs")
        if (gate.rows, gate.cols) != (up.rows, up.cols):
            raise CheckpointError(
                f"gate is {gate.rows} x {gate.cols}, but up is {up.rows} x {up.cols}; they must have one shape"
            )
        self._gate, self._up = gate, up
        self.rows, self.cols = gate.rows, gate.cols
        self.row_step = min(math.lcm(gate.row_step, up.row_step), self.rows)
        self.decode_step = min(math.lcm(gate.decode_step, up.decode_step), self.rows)
        self.encoding = join_names((gate.encoding, up.encoding))

    def extents(self, start: int, stop: int) -> tuple[Extent, ...]:
        check_range("gate/up pair", start, stop, self.row_step, self.rows)
        return self._gate.extents(start, stop) + self._up.extents(start, stop)

    def decode(
        self, parts: Sequence[torch.Tensor], span: tuple[int, int], rows: tuple[int, int], out: torch.Tensor
    ) -> None:
        split = len(self._gate.extents(*span))
        gate, up = out.split(rows[1] - rows[0])
        self._gate.decode(parts[:split], span, rows, gate)
        self._up.decode(parts[split:], span, rows, up)


def _half(fused: Matrix) -> int:
    if fused.outputs_per_row != 1:
        raise ValueError("a pair cannot be split again")
    if fused.rows % 2:
        raise CheckpointError(f"a fused gate/up matrix has {fused.rows} rows, an odd number")
    return fused.rows // 2


class SplitPair(_Pair):
    """Gate and up stacked in one stored matrix [2 * rows, cols]: gate rows first, then up rows."""

    def __init__(self, fused: Matrix) -> None:
        self._fused = fused
        self.rows, self.cols = _half(fused), fused.cols
        # A matrix that is read whole (stored transposed) is read once for both halves.
        self._whole = self.rows % fused.row_step != 0
        self.row_step = self.rows if self._whole else fused.row_step
        self.decode_step = fused.decode_step if self.rows % fused.decode_step == 0 else self.rows
        self.encoding = fused.encoding

    def extents(self, start: int, stop: int) -> tuple[Extent, ...]:
        check_range("split gate/up pair", start, stop, self.row_step, self.rows)
        if self._whole:
            return self._fused.extents(0, self._fused.rows)
        return self._fused.extents(start, stop) + self._fused.extents(self.rows + start, self.rows + stop)

    def decode(
        self, parts: Sequence[torch.Tensor], span: tuple[int, int], rows: tuple[int, int], out: torch.Tensor
    ) -> None:
        count = rows[1] - rows[0]
        upper = rows[0] + self.rows, rows[1] + self.rows
        if self._whole:
            whole = (0, self._fused.rows)
            if self.decode_step == self.rows:  # both halves only come together
                self._fused.decode(parts, whole, whole, out)
                return
            self._fused.decode(parts, whole, rows, out[:count])
            self._fused.decode(parts, whole, upper, out[count:])
            return
        split = len(self._fused.extents(*span))
        self._fused.decode(parts[:split], span, rows, out[:count])
        upper_span = span[0] + self.rows, span[1] + self.rows
        self._fused.decode(parts[split:], upper_span, upper, out[count:])


class InterleavedPair(_Pair):
    """Gate and up alternating in one stored matrix [2 * rows, cols]: gate in even rows, up in odd ones (gpt-oss)."""

    def __init__(self, fused: Matrix) -> None:
        self._fused = fused
        self.rows, self.cols = _half(fused), fused.cols
        self.row_step = math.lcm(fused.row_step, 2) // 2
        self.decode_step = math.lcm(fused.decode_step, 2) // 2
        self.encoding = fused.encoding

    def extents(self, start: int, stop: int) -> tuple[Extent, ...]:
        check_range("interleaved gate/up pair", start, stop, self.row_step, self.rows)
        return self._fused.extents(2 * start, 2 * stop)

    def decode(
        self, parts: Sequence[torch.Tensor], span: tuple[int, int], rows: tuple[int, int], out: torch.Tensor
    ) -> None:
        count = rows[1] - rows[0]
        if isinstance(self._fused, Alternating):
            for half in (0, 1):
                wanted = (2 * rows[0] + half, 2 * rows[1])
                self._fused.decode_alternate(parts, (2 * span[0], 2 * span[1]), wanted, out[half * count :][:count])
            return
        step = chunk_rows(self.decode_step, 2 * self.cols)
        for start in range(rows[0], rows[1], step):
            stop = min(start + step, rows[1])
            wide = scratch("interleaved", 2 * (stop - start) * self.cols, torch.float32).view(-1, self.cols)
            self._fused.decode(parts, (2 * span[0], 2 * span[1]), (2 * start, 2 * stop), wide)
            at = start - rows[0]
            out[at : at + stop - start].copy_(wide[0::2])
            out[count + at : count + at + stop - start].copy_(wide[1::2])
