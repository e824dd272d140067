"""Opening a checkpoint: a directory of safetensors files or a GGUF file becomes an index of tensors."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from batchgen_lite.errors import CheckpointError
from batchgen_lite.offload.checkpoint.directory import read_config, read_weights
from batchgen_lite.offload.checkpoint.files import verify_unchanged
from batchgen_lite.offload.checkpoint.gguf_file import read_gguf
from batchgen_lite.offload.checkpoint.packed_directory import is_packed, read_packed
from batchgen_lite.offload.checkpoint.tensors import Checkpoint, CheckpointFile, TensorInfo

__all__ = ["open_checkpoint", "verify_unchanged"]


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Index a model: a directory with config.json and safetensors files, one that ``pack`` wrote, or a .gguf file
    (any part of a split one).

    Reads headers only and keeps no file open. Raises CheckpointError for missing, damaged or hostile files, and
    UnsupportedError for a GGUF version or tensor type that is not known.
    """
    root = Path(path)
    if not os.path.exists(root):  # unlike Path.exists, false where a parent may not be read
        raise CheckpointError(f"no such model: {root}; pass a directory with config.json, or a .gguf file")
    if root.is_dir():
        config = read_config(root)
        kind, read = ("packed", read_packed) if is_packed(root) else ("safetensors", read_weights)
        files, tensors = read(root)
        return Checkpoint(root, kind, files, tensors, config, {}, _fingerprint(config, files, tensors))
    if root.suffix != ".gguf":
        raise CheckpointError(f"{root} is neither a directory nor a .gguf file; pass the model's directory")
    files, tensors, metadata = read_gguf(root)
    return Checkpoint(root, "gguf", files, tensors, {}, metadata, _fingerprint(metadata, files, tensors))


def _fingerprint(
    config: Mapping[str, Any], files: tuple[CheckpointFile, ...], tensors: Mapping[str, TensorInfo]
) -> str:
    """SHA-256 over what the model is: config or key-values, tensor index, file names, sizes and mtimes."""
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode("utf-8", "surrogatepass"))
    for file in files:
        digest.update(repr((file.path.name, file.size, file.mtime_ns)).encode())
    for name in sorted(tensors):
        info = tensors[name]
        extent = (info.extent.file, info.extent.offset, info.extent.nbytes)
        digest.update(repr((name, info.encoding, info.shape, extent)).encode())
    return digest.hexdigest()
