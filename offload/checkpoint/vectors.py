"""Vectors (biases, norms) as matrices of one row: joined, de-interleaved, or back in rotate-half order."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from batchgen_lite.errors import CheckpointError
from batchgen_lite.offload.checkpoint.combined import join_names
from batchgen_lite.offload.checkpoint.matrix import Matrix
from batchgen_lite.offload.checkpoint.stored import check_range
from batchgen_lite.offload.checkpoint.tensors import Extent


class JoinedVector:
    """Vectors end to end, as one row: the bias of a fused projection. Raises CheckpointError if one has more rows."""

    rows = row_step = decode_step = outputs_per_row = 1

    def __init__(self, vectors: Sequence[Matrix]) -> None:
        for vector in vectors:
            if vector.rows != 1 or vector.outputs_per_row != 1:
                raise CheckpointError(f"a vector was expected, found a matrix of {vector.rows} x {vector.cols}")
        self._vectors = tuple(vectors)
        self.cols = sum(vector.cols for vector in vectors)
        self.encoding = join_names([vector.encoding for vector in vectors])

    def extents(self, start: int, stop: int) -> tuple[Extent, ...]:
        check_range("joined vector", start, stop, 1, 1)
        return tuple(extent for vector in self._vectors for extent in vector.extents(0, 1))

    def decode(
        self, parts: Sequence[torch.Tensor], span: tuple[int, int], rows: tuple[int, int], out: torch.Tensor
    ) -> None:
        part = column = 0
        for vector in self._vectors:
            count = len(vector.extents(0, 1))
            vector.decode(parts[part : part + count], (0, 1), (0, 1), out[:, column : column + vector.cols])
            part += count
            column += vector.cols

    def view(self, parts: Sequence[torch.Tensor], span: tuple[int, int]) -> torch.Tensor | None:
        return self._vectors[0].view(parts, span) if len(self._vectors) == 1 else None


class _Reordered:
    """A vector whose stored elements, seen as [groups, inner, outer], are wanted as [groups, outer, inner]."""

    rows = row_step = decode_step = outputs_per_row = 1

    def __init__(self, vector: Matrix, group: int, outer: int) -> None:
        if vector.rows != 1 or vector.outputs_per_row != 1:
            raise CheckpointError(f"a vector was expected, found a matrix of {vector.rows} x {vector.cols}")
        if group < 1 or vector.cols % group or group % outer:
            raise CheckpointError(f"a vector of {vector.cols} elements is not made of groups of {group}")
        self._vector = vector
        self._stored = (-1, group // outer, outer)
        self.cols = vector.cols
        self.encoding = vector.encoding

    def extents(self, start: int, stop: int) -> tuple[Extent, ...]:
        return self._vector.extents(start, stop)

    def decode(
        self, parts: Sequence[torch.Tensor], span: tuple[int, int], rows: tuple[int, int], out: torch.Tensor
    ) -> None:
        self._vector.decode(parts, span, rows, out)
        out.copy_(out.view(self._stored).transpose(1, 2).reshape(1, -1))

    def view(self, parts: Sequence[torch.Tensor], span: tuple[int, int]) -> torch.Tensor | None:
        return None


class DeinterleavedVector(_Reordered):
    """The bias of an interleaved gate/up pair (gpt-oss): stored g0 u0 g1 u1 ..., wanted g0 g1 ... u0 u1 ..."""

    def __init__(self, vector: Matrix) -> None:
        super().__init__(vector, vector.cols, 2)


class HeadPermutedVector(_Reordered):
    """The bias that belongs to a ``HeadPermutedMatrix``, back in rotate-half order."""

    def __init__(self, vector: Matrix, head_dim: int) -> None:
        super().__init__(vector, head_dim, 2)
