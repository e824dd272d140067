"""The seam between checkpoints and the runtime: a weight matrix as rows that can be read and widened piecewise.

The runtime never sees tensor names or quantisation layouts. It asks a matrix for the byte ranges of a row range,
brings them into memory by whatever path, and asks the matrix to widen some of those rows to fp32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from batchgen_lite.offload.checkpoint.tensors import Extent


class Matrix(Protocol):
    """A weight of logical shape [rows * outputs_per_row, cols]; a vector is a matrix of one row.

    ``row_step``: row ranges given to the methods start and end at multiples of it (or at ``rows``).
    ``decode_step``: divides ``row_step``; the ``rows`` given to ``decode`` need only be multiples of this one. So a
    matrix that must be read whole (stored transposed) is still widened tile by tile.
    ``outputs_per_row``: 1, or 2 for a gate/up pair, where row r stands for gate row r and up row r.
    ``encoding``: the storage format's name, for messages and statistics.
    """

    @property
    def rows(self) -> int: ...
    @property
    def cols(self) -> int: ...
    @property
    def row_step(self) -> int: ...
    @property
    def decode_step(self) -> int: ...
    @property
    def outputs_per_row(self) -> int: ...
    @property
    def encoding(self) -> str: ...

    def extents(self, start: int, stop: int) -> tuple[Extent, ...]:
        """The byte ranges that hold rows [start, stop), in the order in which ``decode`` wants them."""
        ...

    def decode(
        self, parts: Sequence[torch.Tensor], span: tuple[int, int], rows: tuple[int, int], out: torch.Tensor
    ) -> None:
        """Widen rows [rows[0], rows[1]) to fp32.

        ``parts``: one uint8 tensor [nbytes] per extent of ``extents(*span)``; no alignment may be assumed.
        ``out``: fp32 [(rows[1] - rows[0]) * outputs_per_row, cols], C-contiguous, of F16 and BF16 with rows that may
        lie further apart; of a pair first all gate rows, then all up rows. Every element is written. Multi-threaded
        through torch; allocates no more than a few hundred KiB beyond ``out`` per 1,024 x 4,096 elements for plain
        encodings.
        """
        ...

    def view(self, parts: Sequence[torch.Tensor], span: tuple[int, int]) -> torch.Tensor | None:
        """The span as an fp32 tensor sharing memory with ``parts`` where the storage is plain fp32, aligned and
        in one part; else None."""
        ...
