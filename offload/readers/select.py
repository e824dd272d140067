"""Opening the reader that the user chose, or the best that works here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from batchgen_lite.errors import UsageError
from batchgen_lite.offload.checkpoint.tensors import CheckpointFile
from batchgen_lite.offload.readers.direct import DirectReader
from batchgen_lite.offload.readers.kvikio_probe import gds_state
from batchgen_lite.offload.readers.protocol import Reader

READER_KINDS = ("auto", "direct", "buffered", "kvikio")


@dataclass(frozen=True, slots=True)
class OpenedReader:
    """A reader, and in one sentence why it is this one."""

    reader: Reader
    reason: str


def open_reader(
    kind: str,
    paths: Sequence[Path],
    *,
    threads: int = 4,
    block_bytes: int = 4 << 20,
    expected: Sequence[CheckpointFile] | None = None,
) -> OpenedReader:
    """Open a reader of ``kind``: "direct", "buffered", "kvikio", or "auto": kvikio where it has GPUDirect Storage,
    else direct, which reads files buffered by itself where their file system refuses O_DIRECT.

    Raises UsageError for another kind or a kvikio that cannot be used, StorageError if a file is missing.
    """
    if kind not in READER_KINDS:
        raise UsageError(f"--reader {kind!r} is not known; choose one of {', '.join(READER_KINDS)}")
    reason = "chosen by --reader"
    if kind == "auto":
        gds, found = gds_state(paths[0] if paths else None)
        kind, reason = ("kvikio" if gds else "direct"), found
    if kind == "kvikio":
        # Imported only here: its module is of no use without the extra.
        from batchgen_lite.offload.readers.kvikio_reader import KvikioReader

        return OpenedReader(
            KvikioReader(paths, threads=threads, task_bytes=block_bytes, expected=expected),
            reason,
        )
    reader = DirectReader(paths, threads=threads, block_bytes=block_bytes, direct=kind == "direct", expected=expected)
    refused = reader.statistics().fallback_reason
    return OpenedReader(reader, f"{reason}; {refused}" if refused else reason)
