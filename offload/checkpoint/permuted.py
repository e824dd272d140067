"""Matrices stored in another order: transposed, or with llama.cpp's permutation of rotary channels."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from batchgen_lite.errors import CheckpointError
from batchgen_lite.kernels.dequant.plain import PLAIN_DTYPES
from batchgen_lite.kernels.dequant.scratch import scratch
from batchgen_lite.offload.checkpoint.combined import chunk_rows
from batchgen_lite.offload.checkpoint.matrix import Matrix
from batchgen_lite.offload.checkpoint.stored import TensorMatrix, check_range
from batchgen_lite.offload.checkpoint.tensors import Extent, TensorInfo


class TransposedMatrix:
    """A matrix [rows, cols] that is stored as [cols, rows]; read whole, widened in pieces."""

    outputs_per_row = 1
    decode_step = 1

    def __init__(self, stored: TensorInfo | Matrix) -> None:
        self._stored: Matrix = TensorMatrix(stored) if isinstance(stored, TensorInfo) else stored
        if self._stored.outputs_per_row != 1:
            raise ValueError("a pair cannot be transposed")
        self.rows, self.cols = self._stored.cols, self._stored.rows
        self.row_step = self.rows
        self.encoding = self._stored.encoding

    def extents(self, start: int, stop: int) -> tuple[Extent, ...]:
        check_range("transposed matrix", start, stop, self.row_step, self.rows)
        return self._stored.extents(0, self.cols)

    def decode(
        self, parts: Sequence[torch.Tensor], span: tuple[int, int], rows: tuple[int, int], out: torch.Tensor
    ) -> None:
        whole = (0, self.cols)
        if isinstance(self._stored, TensorMatrix) and self.encoding in PLAIN_DTYPES:
            self._decode_plain(self._stored.packed(parts, whole, whole), rows, out)
            return
        step = chunk_rows(self._stored.decode_step, self.rows)
        for start in range(0, self.cols, step):
            stop = min(start + step, self.cols)
            wide = scratch("transposed", (stop - start) * self.rows, torch.float32).view(-1, self.rows)
            self._stored.decode(parts, whole, (start, stop), wide)
            out[:, start:stop].copy_(wide[:, rows[0] : rows[1]].t())

    def _decode_plain(self, packed: torch.Tensor, rows: tuple[int, int], out: torch.Tensor) -> None:
        """Cast a column band of the stored matrix, then transpose it: torch is fast at each, not at both at once."""
        dtype = PLAIN_DTYPES[self.encoding]
        if packed.data_ptr() % dtype.itemsize or packed.storage_offset() % dtype.itemsize:
            packed = packed.clone()
        stored = packed.view(dtype)  # [cols, rows]
        step = max(16, chunk_rows(1, self.cols))
        for start in range(rows[0], rows[1], step):
            stop = min(start + step, rows[1])
            wide = scratch("transposed", self.cols * (stop - start), torch.float32).view(self.cols, -1)
            wide.copy_(stored[:, start:stop])
            out[start - rows[0] : stop - rows[0]].copy_(wide.t())

    def view(self, parts: Sequence[torch.Tensor], span: tuple[int, int]) -> torch.Tensor | None:
        return None


class HeadPermutedMatrix:
    """A q or k projection of a llama-architecture GGUF file, its rows back in rotate-half order.

    llama.cpp's converter stores row (i, j) of each head, i < 2 and j < head_dim / 2, at (j, i), so that rotary pairs
    are neighbours (``LlamaModel.permute`` in convert_hf_to_gguf.py). Raises CheckpointError if the rows are not whole
    heads.
    """

    outputs_per_row = 1

    def __init__(self, matrix: Matrix, head_dim: int) -> None:
        if matrix.outputs_per_row != 1:
            raise ValueError("a pair has no heads")
        if head_dim < 2 or head_dim % 2 or matrix.rows % head_dim:
            raise CheckpointError(f"{matrix.rows} rows are not whole heads of an even size {head_dim}")
        self._matrix = matrix
        self._head_dim = head_dim
        self.rows, self.cols = matrix.rows, matrix.cols
        self.row_step = math.lcm(head_dim, matrix.row_step)
        self.decode_step = math.lcm(head_dim, matrix.decode_step)
        self.encoding = matrix.encoding

    def extents(self, start: int, stop: int) -> tuple[Extent, ...]:
        check_range("head-permuted matrix", start, stop, self.row_step, self.rows)
        return self._matrix.extents(start, stop)

    def decode(
        self, parts: Sequence[torch.Tensor], span: tuple[int, int], rows: tuple[int, int], out: torch.Tensor
    ) -> None:
        step = chunk_rows(self.decode_step, self.cols)
        half = self._head_dim // 2
        for start in range(rows[0], rows[1], step):
            stop = min(start + step, rows[1])
            wide = scratch("permuted", (stop - start) * self.cols, torch.float32).view(-1, self.cols)
            self._matrix.decode(parts, span, (start, stop), wide)
            target = out[start - rows[0] : stop - rows[0]].view(-1, 2, half, self.cols)
            target.copy_(wide.view(-1, half, 2, self.cols).transpose(1, 2))

    def view(self, parts: Sequence[torch.Tensor], span: tuple[int, int]) -> torch.Tensor | None:
        return None
