"""Checks that every ``Matrix`` must pass: any span and row range, misaligned bytes, every element written."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import torch

from batchgen_lite.offload.checkpoint.matrix import Matrix
from batchgen_lite.offload.checkpoint.tensors import Checkpoint, CheckpointFile, Extent, TensorInfo


class StoredBytes:
    """Tensors laid into one byte string with odd gaps between them, as a checkpoint and as memory."""

    def __init__(self) -> None:
        self.data = bytearray()

    def add(self, name: str, encoding: str, shape: Sequence[int], content: bytes, gap: int = 3) -> TensorInfo:
        self.data += b"\xa5" * gap
        info = TensorInfo(name, encoding, tuple(shape), Extent(0, len(self.data), len(content)))
        self.data += content
        return info

    def add_tensor(self, name: str, tensor: torch.Tensor, gap: int = 3) -> TensorInfo:
        """A plain torch tensor under the safetensors name of its dtype."""
        encoding = {
            torch.float32: "F32",
            torch.float16: "F16",
            torch.bfloat16: "BF16",
            torch.float8_e4m3fn: "F8_E4M3",
            torch.uint8: "U8",
            torch.int8: "I8",
            torch.int32: "I32",
            torch.int64: "I64",
        }[tensor.dtype]
        content = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        return self.add(name, encoding, tensor.shape, content, gap)

    def part(self, extent: Extent, misalign: int) -> torch.Tensor:
        """The extent's bytes at an address that is ``misalign`` bytes off a multiple of 64."""
        assert extent.file == 0
        assert 0 <= extent.offset <= extent.offset + extent.nbytes <= len(self.data)
        arena = torch.full((extent.nbytes + 128,), 0x5A, dtype=torch.uint8)
        start = -arena.data_ptr() % 64 + misalign
        part = arena[start : start + extent.nbytes]
        part.copy_(torch.frombuffer(self.data, dtype=torch.uint8)[extent.offset : extent.offset + extent.nbytes])
        return part

    def checkpoint(self, path: Path, tensors: Sequence[TensorInfo] = ()) -> Checkpoint:
        """The bytes written to ``path``, as a checkpoint for ``read_dense``."""
        path.write_bytes(self.data)
        status = path.stat()
        file = CheckpointFile(path, status.st_size, status.st_mtime_ns, status.st_ino)
        index = {info.name: info for info in tensors}
        return Checkpoint(path, "safetensors", (file,), index, {}, {}, "0")


def steps(rng: random.Random, low: int, high: int, step: int, limit: int) -> tuple[int, int]:
    """A random non-empty range of whole steps within [low, high)."""
    marks = sorted({*range(low, high, step), high})
    start, stop = sorted(rng.sample(range(len(marks)), 2))
    assert marks[stop] % step == 0 or marks[stop] == limit
    return marks[start], marks[stop]


def check_matrix(stored: StoredBytes, matrix: Matrix, expected: torch.Tensor, seed: int = 0, tries: int = 12) -> None:
    """``expected`` fp32 [rows * outputs_per_row, cols] (of a pair all gate rows first), compared bit for bit."""
    rng = random.Random(seed)
    outputs, rows, cols = matrix.outputs_per_row, matrix.rows, matrix.cols
    assert expected.shape == (outputs * rows, cols)
    assert expected.dtype == torch.float32
    assert rows == matrix.row_step or matrix.row_step % matrix.decode_step == 0
    reference = expected.view(outputs, rows, cols)
    for attempt in range(tries):
        span = (0, rows) if attempt == 0 else steps(rng, 0, rows, matrix.row_step, rows)
        part = span if attempt == 0 else steps(rng, *span, matrix.decode_step, rows)
        parts = [stored.part(extent, rng.choice((0, 0, 1, 2, 4, 7))) for extent in matrix.extents(*span)]
        out = torch.full(((part[1] - part[0]) * outputs, cols), float("nan"))
        matrix.decode(parts, span, part, out)
        wanted = reference[:, part[0] : part[1]].reshape(-1, cols)
        assert torch.equal(out.view(torch.int32), wanted.contiguous().view(torch.int32)), (attempt, span, part)
        view = matrix.view(parts, span)
        if view is not None:
            whole = reference[:, span[0] : span[1]].reshape(-1, cols)
            assert torch.equal(view, whole)
            assert any(view.data_ptr() == piece.data_ptr() for piece in parts)
