"""The safetensors format: one file's header, read and validated at least as strictly as the safetensors library.

Layout: u64 little-endian header length N, N bytes of JSON (padded with spaces), then the data, gapless.
https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from batchgen_lite.errors import CheckpointError
from batchgen_lite.offload.checkpoint.files import file_identity, read_start
from batchgen_lite.offload.checkpoint.strict_json import parse_object
from batchgen_lite.offload.checkpoint.tensors import CheckpointFile, Extent, TensorInfo

MAX_HEADER_BYTES = 100_000_000
"""The library's own limit."""

MAX_NAME_BYTES = 1024

_DTYPE_BITS: dict[str, int] = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 16),
    **dict.fromkeys(("I32", "U32", "F32"), 32),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 64),
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
}

_ENTRY_KEYS = frozenset(("dtype", "shape", "data_offsets"))


def read_safetensors(path: Path, file: int) -> tuple[CheckpointFile, dict[str, TensorInfo]]:
    """The tensors of one file, whose number in the checkpoint is ``file``; reads the header only.

    Raises CheckpointError, naming the file, for anything that the format does not allow.
    """
    identity = file_identity(path)
    if identity.size < 8:
        raise CheckpointError(f"{path} has {identity.size} bytes, too short for a safetensors file; download it again")
    length = int.from_bytes(read_start(path, 8), "little")
    if length > MAX_HEADER_BYTES:
        raise CheckpointError(
            f"{path}: header length {length} exceeds the limit of {MAX_HEADER_BYTES}; not a safetensors file?"
        )
    data_start = 8 + length
    if data_start > identity.size:
        raise CheckpointError(
            f"{path} is truncated within its header: at least {data_start} bytes expected, {identity.size} found; "
            "download it again"
        )
    raw = read_start(path, length, 8)
    if not raw.startswith(b"{"):
        raise CheckpointError(f"{path}: the header does not begin with '{{'; not a safetensors file?")
    header = parse_object(raw, f"{path}: header")
    _check_metadata(path, header.pop("__metadata__", {}))
    tensors = {name: _entry(path, file, name, value, data_start) for name, value in header.items()}
    _check_gapless(path, tensors, data_start, identity.size)
    return identity, tensors


def _check_metadata(path: Path, metadata: Any) -> None:
    # The library takes null for absent; so do we, because it holds nothing.
    if metadata is None:
        return
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError(f"{path}: __metadata__ must map strings to strings")
    for value in metadata.values():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise CheckpointError(f"{path}: __metadata__ holds text that is not Unicode") from error


def _entry(path: Path, file: int, name: str, entry: Any, data_start: int) -> TensorInfo:
    where = f"{path}: tensor {name[:200]!r}"
    if len(name.encode()) > MAX_NAME_BYTES:
        raise CheckpointError(f"{where}...: name longer than {MAX_NAME_BYTES} bytes")
    if not isinstance(entry, dict) or entry.keys() != _ENTRY_KEYS:
        raise CheckpointError(f"{where}: expected an object with exactly dtype, shape and data_offsets")
    dtype = entry["dtype"]
    if not isinstance(dtype, str) or dtype not in _DTYPE_BITS:
        raise CheckpointError(f"{where}: unknown dtype {str(dtype)[:50]!r}; known: {', '.join(_DTYPE_BITS)}")
    shape = _sizes(where, "shape", entry["shape"])
    offsets = _sizes(where, "data_offsets", entry["data_offsets"])
    if len(offsets) != 2 or offsets[0] > offsets[1]:
        raise CheckpointError(f"{where}: data_offsets {list(offsets)[:4]} are not [start, stop] with start <= stop")
    nbytes = offsets[1] - offsets[0]
    bits = math.prod(shape) * _DTYPE_BITS[dtype]
    if bits != nbytes * 8:
        raise CheckpointError(f"{where}: {dtype} {list(shape)} takes {bits / 8:g} bytes, data_offsets span {nbytes}")
    return TensorInfo(name, dtype, shape, Extent(file, data_start + offsets[0], nbytes))


def _sizes(where: str, key: str, value: Any) -> tuple[int, ...]:
    """A list of integers, each below 2^63; a shape's running product must not overflow either, as in the library."""
    if not isinstance(value, list) or len(value) > 64:
        raise CheckpointError(f"{where}: {key} is not a list of at most 64 integers")
    product = 1
    for item in value:
        if type(item) is not int or not 0 <= item < 2**63:
            raise CheckpointError(f"{where}: {key} holds {str(item)[:50]}, not an integer between 0 and 2^63 - 1")
        product *= item
        if key == "shape" and product >= 2**60:
            raise CheckpointError(f"{where}: shape {value[:8]} has 2^60 elements or more")
    return tuple(value)


def _check_gapless(path: Path, tensors: Mapping[str, TensorInfo], data_start: int, size: int) -> None:
    """The ranges, in order, must tile the data exactly: no overlap, no hole, and an end at the file's end."""
    at = data_start
    last = "the header"
    for info in sorted(tensors.values(), key=lambda info: (info.extent.offset, info.extent.nbytes)):
        if info.extent.offset != at:
            fault = "overlaps" if info.extent.offset < at else "leaves a hole behind"
            raise CheckpointError(
                f"{path}: tensor {info.name[:200]!r} at offset {info.extent.offset} {fault} {last}, which ends at {at}"
            )
        at += info.extent.nbytes
        last = repr(info.name[:200])
    if at != size:
        fault = "is truncated" if size < at else "has bytes that belong to no tensor"
        raise CheckpointError(f"{path} {fault}: expected {at} bytes, found {size}; download it again")
