"""One file of a packed model: widened, rounded and written piece by piece, then durable under its name."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

import torch

from batchgen_lite.errors import StorageError
from batchgen_lite.offload.checkpoint.dense import read_extent
from batchgen_lite.offload.checkpoint.matrix import Matrix
from batchgen_lite.offload.checkpoint.packed_directory import PackedFile
from batchgen_lite.offload.checkpoint.tensors import Checkpoint, Extent, TensorInfo
from batchgen_lite.pack.layout import FilePlan, Item
from batchgen_lite.pack.quantise import quantise_rows

_PIECE_BYTES = 8 << 20
"""Of stored bytes read, and of fp32 weights widened, at a time."""


def working_bytes(files: list[FilePlan]) -> int:
    """An upper estimate of the memory that writing needs beside the process itself: pieces (read, fp32, its rounding
    in two more fp32 tensors and codes), one row step of a matrix that can only be read whole, and the blocks of one
    tensor, which are put together before they are written."""
    whole = blocks = 0
    for item in (item for file in files for item in file.items):
        matrix = item.source
        if not isinstance(matrix, TensorInfo):
            step = matrix.extents(0, min(matrix.row_step, matrix.rows))
            whole = max(whole, sum(extent.nbytes for extent in step))
            blocks = max(blocks, item.target.extent.nbytes)
    return 8 * _PIECE_BYTES + 2 * whole + blocks


def write_file(checkpoint: Checkpoint, plan: FilePlan, directory: Path) -> PackedFile:
    """Write ``plan`` into ``directory``: under a temporary name, synced, then renamed. StorageError if that fails."""
    path = directory / plan.name
    partial = path.with_name(path.name + ".partial")
    digest = hashlib.sha256()
    try:
        with open(partial, "wb") as file:
            for data in _pieces(checkpoint, plan):
                file.write(data)
                digest.update(data)
            file.flush()
            os.fsync(file.fileno())
            _forget_pages(file.fileno())
        os.replace(partial, path)
        sync_directory(directory)
    except OSError as error:
        raise StorageError(
            f"cannot write {partial}: {error.strerror}; finished layers are kept: run the same command again"
        ) from error
    for source in {extent.file for item in plan.items for extent in _extents(item)}:
        _forget_file(checkpoint.files[source].path)
    return PackedFile(plan.name, plan.nbytes, digest.hexdigest())


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _extents(item: Item) -> tuple[Extent, ...]:
    source = item.source
    return (source.extent,) if isinstance(source, TensorInfo) else source.extents(0, source.rows)


def _pieces(checkpoint: Checkpoint, plan: FilePlan) -> Iterator[memoryview]:
    """The file's content from its first byte to its last, with zeros between items and at the end."""
    at = 0
    for item in plan.items:
        yield memoryview(bytes(item.target.extent.offset - at))
        yield from _content(checkpoint, item)
        at = item.target.extent.offset + item.target.extent.nbytes
    yield memoryview(bytes(plan.nbytes - at))


def _content(checkpoint: Checkpoint, item: Item) -> Iterator[memoryview]:
    source = item.source
    if isinstance(source, TensorInfo):
        extent = source.extent
        for start in range(0, extent.nbytes, _PIECE_BYTES):
            piece = Extent(extent.file, extent.offset + start, min(_PIECE_BYTES, extent.nbytes - start))
            yield read_extent(checkpoint, piece).numpy().data
        return
    yield _blocks(checkpoint, item.target, source).view(-1).numpy().data


def _blocks(checkpoint: Checkpoint, target: TensorInfo, matrix: Matrix) -> torch.Tensor:
    """The whole tensor as stored: uint8 [outputs * rows, row bytes]; of a pair first all gate rows, then all up rows.
    Biases (F32) are the widened numbers themselves."""
    outputs = matrix.outputs_per_row
    packed = torch.empty(target.extent.nbytes, dtype=torch.uint8).view(outputs, matrix.rows, -1)
    for span in _steps((0, matrix.rows), matrix.row_step, _row_nbytes(matrix)):
        parts = [read_extent(checkpoint, extent) for extent in matrix.extents(*span)]
        for start, stop in _steps(span, matrix.decode_step, 4 * outputs * matrix.cols):
            wide = torch.empty(outputs * (stop - start), matrix.cols)
            matrix.decode(parts, span, (start, stop), wide)
            rows = (
                wide.view(torch.uint8)
                if target.encoding == "F32"
                else quantise_rows(target.encoding, wide, target.name)
            )
            packed[:, start:stop] = rows.view(outputs, stop - start, -1)
    return packed


def _row_nbytes(matrix: Matrix) -> int:
    return -(-sum(extent.nbytes for extent in matrix.extents(0, matrix.rows)) // matrix.rows)


def _steps(span: tuple[int, int], step: int, row_nbytes: int) -> Iterator[tuple[int, int]]:
    """``span`` in ranges of whole ``step``s and about _PIECE_BYTES."""
    size = max(1, _PIECE_BYTES // max(1, step * row_nbytes)) * step
    for start in range(span[0], span[1], size):
        yield start, min(start + size, span[1])


def _forget_pages(descriptor: int) -> None:
    """Packing reads and writes everything once; it should not push the user's other work out of the page cache."""
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def _forget_file(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        _forget_pages(descriptor)
    finally:
        os.close(descriptor)
