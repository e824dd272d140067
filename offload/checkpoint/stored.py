"""A matrix whose rows lie one after the other in one stored tensor."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from batchgen_lite.errors import CheckpointError
from batchgen_lite.kernels.dequant.rows import decode_rows
from batchgen_lite.kernels.dequant.sizes import row_bytes
from batchgen_lite.offload.checkpoint.tensors import Extent, TensorInfo


def tensor_slice(tensor: TensorInfo, index: int) -> TensorInfo:
    """``tensor[index]`` of a stacked tensor [n, ...], as a tensor of its own that lies inside it.

    Raises CheckpointError if there is no such slice or the encoding's blocks do not end at the slice's end.
    """
    if not tensor.shape or not 0 <= index < tensor.shape[0]:
        raise CheckpointError(f"tensor {tensor.name!r} of shape {list(tensor.shape)} has no slice {index}")
    count = tensor.shape[0]
    if tensor.extent.nbytes % count or (len(tensor.shape) == 1 and tensor.extent.nbytes < count):
        raise CheckpointError(f"tensor {tensor.name!r}: {tensor.extent.nbytes} bytes do not divide into {count} slices")
    nbytes = tensor.extent.nbytes // count
    extent = replace(tensor.extent, offset=tensor.extent.offset + index * nbytes, nbytes=nbytes)
    return TensorInfo(f"{tensor.name}[{index}]", tensor.encoding, tensor.shape[1:], extent)


def check_range(name: str, start: int, stop: int, step: int, limit: int) -> None:
    """Refuse a row range that is empty, outside [0, limit) or not made of whole steps: a caller's mistake."""
    if not 0 <= start < stop <= limit or start % step or (stop % step and stop != limit):
        raise ValueError(f"{name}: rows [{start}, {stop}) of {limit} are not whole steps of {step}")


@dataclass(frozen=True, slots=True, init=False)
class TensorMatrix:
    """Rows [row_start, row_start + rows) of a stored tensor [n, cols] in any encoding; a 1-D tensor is one row.

    Raises CheckpointError if the tensor has more dimensions, too few rows, or bytes that do not fit its shape;
    UnsupportedError if its encoding cannot be widened.
    """

    tensor: TensorInfo
    rows: int
    cols: int
    row_nbytes: int
    offset: int
    """File offset of the first row."""

    def __init__(self, tensor: TensorInfo, row_start: int = 0, rows: int | None = None) -> None:
        if len(tensor.shape) > 2:
            raise CheckpointError(f"tensor {tensor.name!r} has shape {list(tensor.shape)}; a matrix was expected")
        stored_rows, cols = (1, math.prod(tensor.shape)) if len(tensor.shape) < 2 else tensor.shape
        count = stored_rows - row_start if rows is None else rows
        if cols < 1 or row_start < 0 or count < 1 or row_start + count > stored_rows:
            raise CheckpointError(
                f"tensor {tensor.name!r} of shape {list(tensor.shape)} has no rows [{row_start}, {row_start + count})"
            )
        nbytes = row_bytes(tensor.encoding, cols)
        if nbytes * stored_rows != tensor.extent.nbytes:
            raise CheckpointError(
                f"tensor {tensor.name!r}: {tensor.encoding} {list(tensor.shape)} takes {nbytes * stored_rows} bytes, "
                f"{tensor.extent.nbytes} are stored"
            )
        values = (tensor, count, cols, nbytes, tensor.extent.offset + row_start * nbytes)
        for field, value in zip(("tensor", "rows", "cols", "row_nbytes", "offset"), values, strict=True):
            object.__setattr__(self, field, value)

    @property
    def row_step(self) -> int:
        return 1

    @property
    def decode_step(self) -> int:
        return 1

    @property
    def outputs_per_row(self) -> int:
        return 1

    @property
    def encoding(self) -> str:
        return self.tensor.encoding

    def extents(self, start: int, stop: int) -> tuple[Extent, ...]:
        check_range(self.tensor.name, start, stop, 1, self.rows)
        at = self.offset + start * self.row_nbytes
        return (Extent(self.tensor.extent.file, at, (stop - start) * self.row_nbytes),)

    def packed(self, parts: Sequence[torch.Tensor], span: tuple[int, int], rows: tuple[int, int]) -> torch.Tensor:
        """The stored bytes of ``rows``: uint8 [n, row_nbytes], sharing memory with ``parts``."""
        (data,) = parts
        count = rows[1] - rows[0]
        if rows == span:
            return data.view(count, self.row_nbytes)
        first = (rows[0] - span[0]) * self.row_nbytes
        return data[first : first + count * self.row_nbytes].view(count, self.row_nbytes)

    def decode(
        self, parts: Sequence[torch.Tensor], span: tuple[int, int], rows: tuple[int, int], out: torch.Tensor
    ) -> None:
        decode_rows(self.tensor.encoding, self.packed(parts, span, rows), out)

    def decode_alternate(
        self, parts: Sequence[torch.Tensor], span: tuple[int, int], rows: tuple[int, int], out: torch.Tensor
    ) -> None:
        """Widen every second one of ``rows``, beginning with the first."""
        decode_rows(self.tensor.encoding, self.packed(parts, span, rows)[::2], out)

    def view(self, parts: Sequence[torch.Tensor], span: tuple[int, int]) -> torch.Tensor | None:
        if self.tensor.encoding != "F32":
            return None
        (data,) = parts
        if data.data_ptr() % 4 or data.storage_offset() % 4:
            return None
        return data.view(torch.float32).view(span[1] - span[0], self.cols)
