"""Token embeddings: whole in memory, or a row at a time from the disk.

A sweep needs one row per distinct token: a few MB of a matrix that can have a GB. So where memory is short the matrix
stays on the disk, and the rows of a sweep are read together before its first layer.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch

from batchgen_lite.errors import StorageError
from batchgen_lite.offload.arena import Arena
from batchgen_lite.offload.checkpoint.matrix import Matrix
from batchgen_lite.offload.readers.placement import place
from batchgen_lite.offload.readers.protocol import Reader, ReadPiece

ROWS_AT_ONCE = 256  # rows read together when the matrix stays on the disk


class EmbeddingTable:
    """Rows of an embedding matrix [vocab, hidden] as fp32, by token id."""

    def __init__(self, matrix: Matrix, reader: Reader, *, resident: bool) -> None:
        self._matrix = matrix
        self._reader = reader
        self._step = matrix.row_step
        self._arena: Arena | None = None
        self._parts: list[torch.Tensor] | None = None
        if resident:
            self._arena, self._parts = self._read([(0, matrix.rows)])[0:2]
        self.bytes_read = sum(extent.nbytes for extent in matrix.extents(0, matrix.rows)) if resident else 0

    def rows(self, ids: Sequence[int], out: torch.Tensor) -> None:
        """Write the rows of ``ids`` to ``out`` fp32 [len(ids), hidden]. StorageError when a read fails."""
        if not len(ids):
            return
        distinct = sorted(set(ids))
        place_of = {token: row for row, token in enumerate(distinct)}
        table = torch.empty(len(distinct), self._matrix.cols)
        if self._parts is not None:
            span = (0, self._matrix.rows)
            for row, token in enumerate(distinct):
                self._decode(self._parts, span, token, table[row : row + 1])
        else:
            for begin in range(0, len(distinct), ROWS_AT_ONCE):
                self._read_rows(distinct[begin : begin + ROWS_AT_ONCE], table[begin : begin + ROWS_AT_ONCE])
        torch.index_select(table, 0, torch.tensor([place_of[token] for token in ids]), out=out)

    def _read_rows(self, tokens: Sequence[int], table: torch.Tensor) -> None:
        spans = [self._span(token) for token in tokens]
        arena, *_ = loaded = self._read(spans)
        parts = iter(loaded[1])
        for row, (token, span) in enumerate(zip(tokens, spans, strict=True)):
            count = len(self._matrix.extents(*span))
            self._decode([next(parts) for _ in range(count)], span, token, table[row : row + 1])
        del parts, loaded
        arena.close()

    def _span(self, token: int) -> tuple[int, int]:
        start = token // self._step * self._step
        return start, min(start + self._step, self._matrix.rows)

    def _decode(self, parts: Sequence[torch.Tensor], span: tuple[int, int], token: int, out: torch.Tensor) -> None:
        step = self._matrix.decode_step
        if step == 1:
            self._matrix.decode(parts, span, (token, token + 1), out)
            return
        start = token // step * step
        rows = torch.empty(min(step, self._matrix.rows - start), self._matrix.cols)
        self._matrix.decode(parts, span, (start, start + rows.shape[0]), rows)
        out[0] = rows[token - start]

    def _read(self, spans: Sequence[tuple[int, int]]) -> tuple[Arena, list[torch.Tensor]]:
        """Read row ranges into an arena of their own; the parts of all spans in order."""
        extents = [extent for span in spans for extent in self._matrix.extents(*span)]
        placement = place(extents, 0, self._reader.alignment)
        arena = Arena(placement.end)
        pieces = [
            ReadPiece(extent.file, extent.offset, extent.nbytes, arena.view, position)
            for extent, position in zip(extents, placement.positions, strict=True)
        ]
        finished = threading.Event()
        failures: list[BaseException] = []

        def done(error: BaseException | None) -> None:
            if error is not None:
                failures.append(error)
            finished.set()

        self._reader.submit(pieces, done)
        finished.wait()
        if failures:
            raise failures[0] if isinstance(failures[0], StorageError) else StorageError(str(failures[0]))
        parts = [
            arena.tensor[position : position + extent.nbytes]
            for extent, position in zip(extents, placement.positions, strict=True)
        ]
        return arena, parts

    def close(self) -> None:
        self._parts = None
        if self._arena is not None:
            self._arena.close()
