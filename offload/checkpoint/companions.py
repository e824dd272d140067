"""What matrices with scales in tensors of their own share: row ranges of several tensors, and small parts widened."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from batchgen_lite.errors import CheckpointError
from batchgen_lite.kernels.dequant.rows import decode_rows
from batchgen_lite.offload.checkpoint.tensors import Extent, TensorInfo

FLOAT_SCALES = ("F32", "F16", "BF16")
EXPONENT_SCALES = ("F8_E8M0", "U8")


class QuantisedMatrix:
    """Defaults of a matrix that is never plain fp32 and no pair."""

    outputs_per_row = 1
    rows: int
    cols: int
    row_step: int
    decode_step: int
    encoding: str

    def view(self, parts: Sequence[torch.Tensor], span: tuple[int, int]) -> torch.Tensor | None:
        return None


def expect(tensor: TensorInfo, encodings: Sequence[str], shape: Sequence[int]) -> None:
    """Raise CheckpointError unless the tensor has one of the encodings and the shape."""
    if tensor.encoding not in encodings or tensor.shape != tuple(shape):
        raise CheckpointError(
            f"tensor {tensor.name!r} is {tensor.encoding} {list(tensor.shape)}; "
            f"{' or '.join(encodings)} {list(shape)} was expected"
        )


def row_extent(tensor: TensorInfo, start: int, stop: int) -> Extent:
    """The bytes of entries [start, stop) along the first dimension of a non-empty tensor."""
    nbytes = tensor.extent.nbytes // tensor.shape[0]
    return Extent(tensor.extent.file, tensor.extent.offset + start * nbytes, (stop - start) * nbytes)


def typed(part: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Bytes as 1-D ``dtype``, copied only if they are not aligned to it."""
    if part.data_ptr() % dtype.itemsize or part.storage_offset() % dtype.itemsize:
        part = part.clone()
    return part.view(dtype)


def widen_scales(part: torch.Tensor, encoding: str, cols: int) -> torch.Tensor:
    """Scales as fp32 [n, cols]; of the encodings that hold bare exponents 2^(e - 127)."""
    if encoding in EXPONENT_SCALES:
        return part.view(torch.float8_e8m0fnu).float().view(-1, cols)
    out = torch.empty(part.numel() // {"F32": 4}.get(encoding, 2) // cols, cols)
    decode_rows(encoding, part.view(len(out), -1), out)
    return out
