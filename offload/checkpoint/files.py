"""Opening checkpoint files safely: regular files only, none outside the directory, and remembered as they were."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from batchgen_lite.errors import CheckpointError
from batchgen_lite.offload.checkpoint.tensors import Checkpoint, CheckpointFile


def file_identity(path: Path) -> CheckpointFile:
    """Size, mtime and inode of a regular file; CheckpointError if it is missing or something else (a FIFO, say)."""
    try:
        status = path.stat()
    except OSError as error:
        raise CheckpointError(f"cannot open weight file {path}: {error.strerror}") from error
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointError(f"weight file {path} is not a regular file")
    return CheckpointFile(path, status.st_size, status.st_mtime_ns, status.st_ino)


def shard_path(root: Path, name: str) -> Path:
    """The path of file ``name`` of directory ``root``, refused if it would lie elsewhere.

    ``name`` is a bare file name. It may be a symlink, but only to a file inside ``root`` or, as in the hub's cache,
    from ``snapshots/REVISION/`` or a folder below it into the ``blobs/`` of the same repository.
    """
    if name in ("", ".", "..") or "/" in name or "\\" in name or "\0" in name:
        raise CheckpointError(f"shard name {name[:200]!r} is not a plain file name; it may not leave {root}")
    path = root / name
    if path.is_symlink():
        target = Path(os.path.realpath(path))
        home = Path(os.path.realpath(root))
        blobs = [parent.parent / "blobs" for parent in home.parents if parent.name == "snapshots"]
        if not any(target.is_relative_to(allowed) for allowed in (home, *blobs[:1])):
            raise CheckpointError(
                f"{path} is a link to {target}, outside the checkpoint; copy or move the file into {root}, "
                "or pass the directory that holds the real files"
            )
    return path


def read_limited(path: Path, limit: int) -> bytes:
    """The content of a small regular file of the checkpoint; CheckpointError if it is longer than ``limit`` bytes."""
    size = file_identity(path).size
    if size > limit:
        raise CheckpointError(f"{path} has {size} bytes, more than the {limit} allowed for such a file")
    return read_start(path, size)


def read_start(path: Path, nbytes: int, offset: int = 0) -> bytes:
    """``nbytes`` bytes from ``offset``; CheckpointError if the file ends before that or cannot be read."""
    try:
        with open(path, "rb") as file:
            file.seek(offset)
            data = file.read(nbytes)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    if len(data) != nbytes:
        raise CheckpointError(
            f"{path} is truncated: {nbytes} bytes expected at offset {offset}, {len(data)} found; download it again"
        )
    return data


def verify_unchanged(checkpoint: Checkpoint) -> None:
    """Raise CheckpointError if a weight file was replaced, truncated or modified since the checkpoint was opened."""
    for file in checkpoint.files:
        now = file_identity(file.path)
        for what, then, found in (
            ("size", file.size, now.size),
            ("modification time", file.mtime_ns, now.mtime_ns),
            ("inode", file.inode, now.inode),
        ):
            if then != found:
                raise CheckpointError(
                    f"weight file {file.path} changed during the run: {what} was {then}, is {found}; "
                    "start again with files that stay as they are"
                )
