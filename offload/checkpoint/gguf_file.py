"""GGUF checkpoints: tensors and byte ranges of one file or of all parts of a split one."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from batchgen_lite.errors import CheckpointError, UnsupportedError
from batchgen_lite.offload.checkpoint.files import file_identity
from batchgen_lite.offload.checkpoint.gguf_header import GGUFHeader, TensorRecord, read_header
from batchgen_lite.offload.checkpoint.tensors import CheckpointFile, Extent, TensorInfo

_SPLIT_NAME = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")

GGUFContents = tuple[tuple[CheckpointFile, ...], dict[str, TensorInfo], dict[str, Any]]


def read_gguf(path: Path) -> GGUFContents:
    """Files, tensors and key-values of the GGUF file ``path``, which may be any part of a split model.

    Raises CheckpointError for damaged files and missing parts, UnsupportedError for unknown tensor types.
    """
    match = _SPLIT_NAME.fullmatch(path.name)
    if match is None:
        identity, header = _open(path)
        parts = header.metadata.get("split.count", 1)
        if parts > 1:
            raise CheckpointError(
                f"{path} is one of {parts} parts of a model; give all parts their names "
                f"NAME-00001-of-{parts:05d}.gguf and so on, in one directory"
            )
        return (identity,), _tensors(path, 0, identity.size, header), header.metadata
    return _read_split(path.parent, match[1], int(match[3]))


def _open(path: Path) -> tuple[CheckpointFile, GGUFHeader]:
    identity = file_identity(path)  # links are fine: the user named the file, and parts are named after it
    header = read_header(path, identity.size)
    split = header.metadata.get("split.count", 1)
    if type(split) is not int or not 0 <= split <= 99_999:
        raise CheckpointError(f"{path}: split.count is {split!r}, not a number of parts")
    return identity, header


def _read_split(root: Path, stem: str, parts: int) -> GGUFContents:
    if parts < 1:
        raise CheckpointError(f"{root / stem}: a model of {parts} parts")
    files: list[CheckpointFile] = []
    tensors: dict[str, TensorInfo] = {}
    metadata: dict[str, Any] = {}
    for number in range(parts):
        path = root / f"{stem}-{number + 1:05d}-of-{parts:05d}.gguf"
        if not path.exists():
            raise CheckpointError(f"part {number + 1} of {parts} is missing: {path}; download it again")
        identity, header = _open(path)
        _check_part(path, header.metadata, number, parts)
        if number == 0:
            metadata = header.metadata
        found = _tensors(path, number, identity.size, header)
        twice = tensors.keys() & found.keys()
        if twice:
            raise CheckpointError(f"{path}: tensor {min(twice)!r} is in an earlier part too")
        tensors |= found
        files.append(identity)
    total = metadata.get("split.tensors.count", len(tensors))
    if total != len(tensors):
        raise CheckpointError(f"{root / stem}: the {parts} parts hold {len(tensors)} tensors, the first says {total}")
    return tuple(files), tensors, metadata


def _check_part(path: Path, metadata: Mapping[str, Any], number: int, parts: int) -> None:
    stated = (metadata.get("split.no"), metadata.get("split.count"))
    if stated != (number, parts):
        raise CheckpointError(
            f"{path}: named part {number + 1} of {parts}, but its metadata says split.no {stated[0]} (from 0), "
            f"split.count {stated[1]}"
        )


def _tensors(path: Path, file: int, size: int, header: GGUFHeader) -> dict[str, TensorInfo]:
    tensors: dict[str, TensorInfo] = {}
    for record in header.tensors:
        if record.name in tensors:
            raise CheckpointError(f"{path}: tensor {record.name!r} is listed twice")
        tensors[record.name] = _tensor(path, file, header, record)
    end = header.data_start
    for info in sorted(tensors.values(), key=lambda info: (info.extent.offset, info.extent.nbytes)):
        if info.extent.offset < end:
            raise CheckpointError(
                f"{path}: tensor {info.name!r} at offset {info.extent.offset} overlaps data up to {end}"
            )
        end = info.extent.offset + info.extent.nbytes
    if end > size:
        raise CheckpointError(f"{path} is truncated: at least {end} bytes expected, {size} found; download it again")
    return tensors


def _tensor(path: Path, file: int, header: GGUFHeader, record: TensorRecord) -> TensorInfo:
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    where = f"{path}: tensor {record.name!r}"
    try:
        kind = GGMLQuantizationType(record.type)
    except ValueError as error:
        raise UnsupportedError(f"{where} has ggml type {record.type}, unknown to the installed gguf package") from error
    block, block_bytes = GGML_QUANT_SIZES[kind]
    if min(record.dims) < 1 or math.prod(record.dims) >= 2**60:
        raise CheckpointError(f"{where} has shape {list(record.dims)}")
    if record.dims[0] % block:
        raise CheckpointError(f"{where}: rows of {record.dims[0]} elements are not multiples of {kind.name}'s {block}")
    if record.offset % header.alignment:
        raise CheckpointError(f"{where}: offset {record.offset} is not a multiple of the alignment {header.alignment}")
    nbytes = math.prod(record.dims) // block * block_bytes
    shape = tuple(reversed(record.dims))
    return TensorInfo(record.name, kind.name, shape, Extent(file, header.data_start + record.offset, nbytes))
