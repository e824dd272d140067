"""Reading a small matrix at once, widened to fp32, by plain buffered reads."""

from __future__ import annotations

import os

import torch

from batchgen_lite.errors import CheckpointError, StorageError
from batchgen_lite.offload.checkpoint.matrix import Matrix
from batchgen_lite.offload.checkpoint.tensors import Checkpoint, Extent

_PIECE_BYTES = 8 << 20


def read_dense(checkpoint: Checkpoint, matrix: Matrix) -> torch.Tensor:
    """The whole matrix as fp32 [rows * outputs_per_row, cols]; of a pair first all gate rows, then all up rows.

    Memory: the result and about 8 MiB (or one row step, if that is larger) of packed bytes. Raises CheckpointError if
    a file has become shorter, StorageError if a read fails.
    """
    out = torch.empty(matrix.rows * matrix.outputs_per_row, matrix.cols)
    for start, stop in _pieces(matrix):
        parts = [read_extent(checkpoint, extent) for extent in matrix.extents(start, stop)]
        if matrix.outputs_per_row == 1:
            matrix.decode(parts, (start, stop), (start, stop), out[start:stop])
            continue
        wide = torch.empty((stop - start) * matrix.outputs_per_row, matrix.cols)
        matrix.decode(parts, (start, stop), (start, stop), wide)
        # [outputs, rows, cols]: each output's rows go to their place
        out.view(matrix.outputs_per_row, matrix.rows, -1)[:, start:stop] = wide.view(
            matrix.outputs_per_row, stop - start, -1
        )
    return out


def _pieces(matrix: Matrix) -> list[tuple[int, int]]:
    total = sum(extent.nbytes for extent in matrix.extents(0, matrix.rows))
    steps = max(1, matrix.rows * _PIECE_BYTES // max(total, 1) // matrix.row_step)
    size = steps * matrix.row_step
    return [(start, min(start + size, matrix.rows)) for start in range(0, matrix.rows, size)]


def read_extent(checkpoint: Checkpoint, extent: Extent) -> torch.Tensor:
    """The bytes of one extent: uint8 [nbytes]. Errors as ``read_dense``."""
    path = checkpoint.files[extent.file].path
    data = torch.empty(extent.nbytes, dtype=torch.uint8)
    buffer = data.numpy().data
    done = 0
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            while done < extent.nbytes:
                count = os.preadv(descriptor, [buffer[done:]], extent.offset + done)
                if count == 0:
                    break
                done += count
        finally:
            os.close(descriptor)
    except OSError as error:
        raise StorageError(f"cannot read {path} at offset {extent.offset + done}: {error.strerror}") from error
    if done < extent.nbytes:
        raise CheckpointError(
            f"{path} is truncated: {extent.nbytes} bytes expected at offset {extent.offset}, {done} found; "
            "download it again"
        )
    return data
