"""Where a checkpoint's tensors lie: names, encodings, shapes and byte ranges, without reading any weight."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Extent:
    """A contiguous byte range of one checkpoint file. ``file`` indexes ``Checkpoint.files``."""

    file: int
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One stored tensor. ``shape`` is torch order (outermost first); ``encoding`` names the storage format
    ("F32", "BF16", "F16", "F8_E4M3", "U8", "I32", ... as safetensors names them; "Q4_1", "Q8_0", ... as GGUF does)."""

    name: str
    encoding: str
    shape: tuple[int, ...]
    extent: Extent


@dataclass(frozen=True, slots=True)
class CheckpointFile:
    """A weight file, with what proves later that it has not been replaced or truncated under the run."""

    path: Path
    size: int
    mtime_ns: int
    inode: int


@dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint: an index only, no weights and no open file descriptors.

    ``config`` is the parsed config.json of a directory ({} for GGUF); ``metadata`` the key-values of a GGUF file
    ({} for a directory). ``fingerprint`` is a hex digest over config, tensor index, file sizes and mtimes.
    """

    root: Path
    format: str  # "safetensors" | "packed" (written by ``pack``) | "gguf"
    files: tuple[CheckpointFile, ...]
    tensors: Mapping[str, TensorInfo]
    config: Mapping[str, Any]
    metadata: Mapping[str, Any]
    fingerprint: str
