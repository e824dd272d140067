"""Where a job's lines lie: the input file itself, or a staged copy of a pipe or of a compressed file.

Lines are read twice: once to check and index them, once at admission by offset. A pipe cannot be read twice and a gz
file not by offset, so both are copied, decompressed, to OUT.input; with the copy there, ``--resume`` needs no pipe.
"""

from __future__ import annotations

import gzip
import os
import stat
import sys
import zlib
from pathlib import Path
from typing import BinaryIO, cast

from batchgen_lite.errors import StorageError, UsageError

_GZIP_MAGIC = b"\x1f\x8b"
_BLOCK = 1 << 20


def open_input(source: str, staged: Path, *, resume: bool) -> Path:
    """The path of plain lines for ``source`` (a path, or "-" for standard input), staged at ``staged`` if needed.

    With ``resume`` and standard input as the source, an existing staged copy is used and the pipe is not read.
    UsageError if there is no such input or its gz data is damaged; StorageError if the copy cannot be written.
    """
    if source == "-":
        if resume and staged.exists():
            return staged
        if sys.stdin is None or sys.stdin.isatty():
            raise UsageError("--input - reads standard input, which is a terminal here; pipe a file into it")
        return _stage(sys.stdin.buffer, staged)
    path = Path(source)
    try:
        mode = path.stat().st_mode
    except OSError as error:
        raise UsageError(f"cannot read the input {source}: {error.strerror}; check --input") from None
    if stat.S_ISDIR(mode):
        raise UsageError(f"the input {source} is a directory; give a JSONL file, or - for standard input")
    try:
        with path.open("rb") as stream:
            if not stat.S_ISREG(mode):
                return _stage(stream, staged)
            magic = stream.read(2)
            if magic != _GZIP_MAGIC:
                return path
            stream.seek(0)
            return _stage(stream, staged)
    except PermissionError as error:
        raise UsageError(f"cannot read the input {source}: {error.strerror}; check its permissions") from None


def _stage(stream: BinaryIO, staged: Path) -> Path:
    """Copy ``stream``, decompressed if it is gz, to ``staged``; complete or absent, whatever happens."""
    unfinished = staged.with_name(staged.name + ".new")
    try:
        with unfinished.open("wb") as copy:
            head = stream.read(2)
            source: BinaryIO = cast(BinaryIO, _Prefixed(head, stream))
            if head == _GZIP_MAGIC:
                source = cast(BinaryIO, gzip.GzipFile(fileobj=source, mode="rb"))
            _copy(source, copy)
            copy.flush()
            os.fsync(copy.fileno())
        os.replace(unfinished, staged)
    except OSError as error:
        unfinished.unlink(missing_ok=True)
        raise StorageError(
            f"cannot copy the input to {staged}: {error.strerror}; free space there or choose another --output"
        ) from error
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
    return staged


def _copy(source: BinaryIO, copy: BinaryIO) -> None:
    done = 0
    while True:
        try:
            block = source.read(_BLOCK)
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise UsageError(
                f"the input's gz data is damaged behind {done} decompressed bytes ({error}); "
                "fetch or compress the file again"
            ) from None
        if not block:
            return
        copy.write(block)
        done += len(block)


class _Prefixed:
    """A stream whose first bytes were already read: pipes cannot seek back."""

    def __init__(self, head: bytes, rest: BinaryIO) -> None:
        self._head = head
        self._rest = rest

    def read(self, size: int = -1) -> bytes:
        if not self._head:
            return self._rest.read(size)
        if size < 0:
            data, self._head = self._head + self._rest.read(), b""
            return data
        data, self._head = self._head[:size], self._head[size:]
        return data
