"""The header of one GGUF file: key-values and tensor records, every length checked against the file before it is used.

The gguf package's GGUFReader is not used here: it builds a numpy array per vocabulary entry (measured: 20 s and 640 MB
for 200,000 tokens and merges, where this takes half a second and 35 MB), and lengths beyond the file's end send it into
endless loops. The tests hold both against each other. Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from batchgen_lite.errors import CheckpointError, UnsupportedError

MAX_HEADER_BYTES = 512 << 20
MAX_ARRAY_ITEMS = 1 << 24
MAX_STRING_BYTES = 64 << 20
MAX_NAME_BYTES = 1024
MAX_DIMS = 4
"""ggml's own limit."""

_STRING, _ARRAY = 8, 9
_SCALARS = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "?",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}


@dataclass(frozen=True, slots=True)
class TensorRecord:
    """A tensor as the header states it: ``dims`` innermost first, ``type`` ggml's number, ``offset`` into the data."""

    name: str
    dims: tuple[int, ...]
    type: int
    offset: int


@dataclass(frozen=True, slots=True)
class GGUFHeader:
    """``data_start`` is the file offset of the data section."""

    metadata: dict[str, Any]
    tensors: tuple[TensorRecord, ...]
    alignment: int
    data_start: int


def read_header(path: Path, size: int) -> GGUFHeader:
    """Parse the header of a GGUF v2 or v3 file of ``size`` bytes.

    Raises CheckpointError for a damaged or truncated file, UnsupportedError for another version or byte order.
    """
    try:
        with open(path, "rb", buffering=1 << 18) as file:
            return _Cursor(path, file, size).header()
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error


class _Cursor:
    """Reads values one after the other; refuses to go beyond the file's end."""

    def __init__(self, path: Path, file: BinaryIO, size: int) -> None:
        self._path = path
        self._file = file
        self._at = 0
        self._size = size

    def header(self) -> GGUFHeader:
        if self._size < 24 or self._take(4) != b"GGUF":
            raise CheckpointError(f"{self._path} ({self._size} bytes) is not a GGUF file")
        version = self._uint(4)
        if version not in (2, 3):
            fault = "is big-endian" if version & 0xFFFF == 0 else f"has GGUF version {version}"
            raise UnsupportedError(f"{self._path} {fault}; little-endian version 2 and 3 are read")
        tensor_count = self._count("tensors", 33)
        key_count = self._count("key-values", 13)
        metadata: dict[str, Any] = {}
        for _ in range(key_count):
            key = self._string(MAX_NAME_BYTES)
            if key in metadata:
                raise CheckpointError(f"{self._path}: duplicate key {key[:200]!r}")
            metadata[key] = self._value(key, self._uint(4))
        records = tuple(self._record() for _ in range(tensor_count))
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 8 or alignment & (alignment - 1) or alignment > 1 << 20:
            raise CheckpointError(
                f"{self._path}: general.alignment is {alignment!r}, not a power of two from 8 to 2^20"
            )
        return GGUFHeader(metadata, records, alignment, -(-self._at // alignment) * alignment)

    def _take(self, nbytes: int) -> bytes:
        end = self._at + nbytes
        if end > MAX_HEADER_BYTES:
            raise CheckpointError(f"{self._path}: the header is longer than {MAX_HEADER_BYTES} bytes")
        data = self._file.read(nbytes) if end <= self._size else b""
        if len(data) != nbytes:
            raise CheckpointError(
                f"{self._path} is truncated or damaged within its header: {nbytes} bytes expected at offset "
                f"{self._at}, the file has {self._size}; download it again"
            )
        self._at = end
        return data

    def _uint(self, nbytes: int) -> int:
        return int.from_bytes(self._take(nbytes), "little")

    def _count(self, what: str, least_bytes: int) -> int:
        """A number of items, each at least ``least_bytes`` long, that must fit into the rest of the file."""
        count = self._uint(8)
        if count * least_bytes > self._size - self._at:
            raise CheckpointError(f"{self._path}: {count} {what} cannot fit into a file of {self._size} bytes")
        return count

    def _string(self, limit: int) -> str:
        length = self._uint(8)
        if length > limit:
            raise CheckpointError(f"{self._path}: a string of {length} bytes at offset {self._at}, limit {limit}")
        try:
            return self._take(length).decode("utf-8")
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{self._path}: a string before offset {self._at} is not UTF-8: {error}") from error

    def _value(self, key: str, kind: int) -> Any:
        if kind == _STRING:
            return self._string(MAX_STRING_BYTES)
        if kind == _ARRAY:
            return self._array(key)
        return self._numbers(key, kind, 1)[0]

    def _array(self, key: str) -> list[Any]:
        kind = self._uint(4)
        count = self._count("array items", 8 if kind == _STRING else 1)
        if count > MAX_ARRAY_ITEMS:
            raise CheckpointError(f"{self._path}: array {key[:200]!r} has {count} items, limit {MAX_ARRAY_ITEMS}")
        if kind == _STRING:
            return [self._string(MAX_STRING_BYTES) for _ in range(count)]
        return self._numbers(key, kind, count)

    def _numbers(self, key: str, kind: int, count: int) -> list[Any]:
        if kind not in _SCALARS:  # arrays of arrays are in the format's text, but nobody writes them
            raise UnsupportedError(f"{self._path}: key {key[:200]!r} has value type {kind}, which is not supported")
        dtype = np.dtype(_SCALARS[kind])
        values: list[Any] = np.frombuffer(self._take(count * dtype.itemsize), dtype).tolist()
        return values

    def _record(self) -> TensorRecord:
        name = self._string(MAX_NAME_BYTES)
        n_dims = self._uint(4)
        if not 1 <= n_dims <= MAX_DIMS:
            raise CheckpointError(f"{self._path}: tensor {name!r} has {n_dims} dimensions, expected 1 to {MAX_DIMS}")
        *dims, kind, offset = struct.unpack(f"<{n_dims}QIQ", self._take(8 * n_dims + 12))
        return TensorRecord(name, tuple(dims), kind, offset)
