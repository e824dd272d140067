"""Directories that ``batchgen-lite pack`` wrote: an index, one file a layer. The format: docs/pack-format.md."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from batchgen_lite.errors import CheckpointError, UnsupportedError
from batchgen_lite.kernels.dequant.sizes import is_supported, row_bytes
from batchgen_lite.offload.checkpoint.files import file_identity, read_limited, shard_path
from batchgen_lite.offload.checkpoint.strict_json import parse_object
from batchgen_lite.offload.checkpoint.tensors import CheckpointFile, Extent, TensorInfo

PACK_INDEX = "batchgen_pack.json"
PACK_FORMAT = "batchgen-pack"
PACK_VERSION = 1
BLOB_ALIGNMENT = 4096
MAX_INDEX_BYTES = 256 << 20  # some 60 bytes for each of up to a few million tensors


@dataclass(frozen=True, slots=True)
class PackedFile:
    """A weight file as the index states it. ``sha256``: hex digest of its content."""

    name: str
    nbytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class PackIndex:
    """The parsed index. ``settings`` says how it was packed and from what, see docs/pack-format.md."""

    settings: dict[str, Any]
    files: tuple[PackedFile, ...]
    tensors: dict[str, TensorInfo]


def is_packed(root: Path) -> bool:
    """Whether the directory is a packed model."""
    return (root / PACK_INDEX).exists()


def read_pack_index(root: Path) -> PackIndex:
    """Parse and check the index of ``root``; weight files are not touched.

    Raises CheckpointError for an index that is damaged, contradicts itself or points outside its files, and
    UnsupportedError for another version of the format.
    """
    path = root / PACK_INDEX
    index = parse_object(read_limited(shard_path(root, PACK_INDEX), MAX_INDEX_BYTES), str(path))
    if index.get("format") != PACK_FORMAT:
        raise CheckpointError(f"{path}: format is {str(index.get('format'))[:50]!r}, {PACK_FORMAT!r} was expected")
    if index.get("version") != PACK_VERSION:
        raise UnsupportedError(
            f"{path} has version {str(index.get('version'))[:50]} of the packed format; this program reads version "
            f"{PACK_VERSION}. Pack the model again"
        )
    settings, listed, tensors = index.get("settings"), index.get("files"), index.get("tensors")
    if not isinstance(settings, dict) or not isinstance(listed, list) or not isinstance(tensors, dict):
        raise CheckpointError(f"{path}: settings, files or tensors are missing; pack the model again")
    files = tuple(_file(path, entry) for entry in listed)
    return PackIndex(settings, files, {name: _tensor(path, files, name, entry) for name, entry in tensors.items()})


def read_packed(root: Path) -> tuple[tuple[CheckpointFile, ...], dict[str, TensorInfo]]:
    """Files and tensors of a packed model. Errors as ``read_pack_index``, and CheckpointError for a file that is
    missing or has not the stated size."""
    index = read_pack_index(root)
    found = []
    for file in index.files:
        identity = file_identity(shard_path(root, file.name))
        if identity.size != file.nbytes:
            raise CheckpointError(
                f"{identity.path} has {identity.size} bytes, the index says {file.nbytes}; pack the model again"
            )
        found.append(identity)
    return tuple(found), index.tensors


def _file(path: Path, entry: Any) -> PackedFile:
    if isinstance(entry, dict) and entry.keys() == {"name", "nbytes", "sha256"}:
        name, nbytes, digest = entry["name"], entry["nbytes"], entry["sha256"]
        if isinstance(name, str) and isinstance(digest, str) and type(nbytes) is int and nbytes >= 0:
            return PackedFile(name, nbytes, digest)
    raise CheckpointError(f"{path}: {str(entry)[:100]} does not describe a file by name, nbytes and sha256")


def _tensor(path: Path, files: tuple[PackedFile, ...], name: str, entry: Any) -> TensorInfo:
    """Entries are [encoding, shape, file number, offset]; the size follows from the first two."""
    where = f"{path}: tensor {name[:200]!r}"
    if not isinstance(entry, list) or len(entry) != 4 or not isinstance(entry[0], str):
        raise CheckpointError(f"{where}: {str(entry)[:100]} is not [encoding, shape, file, offset]")
    encoding, shape, file, offset = entry
    if not isinstance(shape, list) or not all(type(size) is int and 0 < size < 2**40 for size in shape):
        raise CheckpointError(f"{where}: {str(shape)[:100]} is no shape")
    if type(file) is not int or type(offset) is not int or not 0 <= file < len(files) or offset < 0:
        raise CheckpointError(f"{where}: file {file} at {offset} is none of the {len(files)} files")
    nbytes = stored_bytes(encoding, tuple(shape))
    if offset + nbytes > files[file].nbytes:
        raise CheckpointError(f"{where} ends at {offset + nbytes}, beyond the end of {files[file].name}")
    return TensorInfo(name, encoding, tuple(shape), Extent(file, offset, nbytes))


_INTEGERS = {"BOOL": 1, "U8": 1, "I8": 1, "F8_E8M0": 1, "I16": 2, "U16": 2, "I32": 4, "U32": 4, "I64": 8, "U64": 8}


def stored_bytes(encoding: str, shape: tuple[int, ...]) -> int:
    """Bytes of a tensor: rows of blocks, or plain integers (the codes and scales of quantised checkpoints).

    Raises UnsupportedError for an encoding that is neither."""
    if encoding in _INTEGERS:
        return math.prod(shape) * _INTEGERS[encoding]
    if not is_supported(encoding):
        raise UnsupportedError(f"tensors stored as {encoding} cannot be in a packed model")
    return math.prod(shape[:-1]) * row_bytes(encoding, shape[-1] if shape else 1)
