"""The unfinished packed model: its directory, its lock, and the list of files that are done."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from batchgen_lite.errors import StorageError, UsageError
from batchgen_lite.offload.checkpoint.packed_directory import PackedFile

_LIST = "progress.jsonl"


class Progress:
    """``OUT.partial`` with one line of settings and one for every finished file. A killed run's list is taken up again
    if it was made with the same settings. UsageError if it was not, or if another process is at work in it;
    StorageError if it cannot be made."""

    def __init__(self, output: Path, settings: Mapping[str, Any]) -> None:
        self.directory = output.with_name(output.name + ".partial")
        self.done: dict[str, PackedFile] = {}
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._file = open(self.directory / _LIST, "a+b")  # noqa: SIM115 (closed by close)
        except OSError as error:
            raise StorageError(f"cannot write into {self.directory}: {error.strerror}") from error
        try:
            self._lock()
            self._take_up(dict(settings))
        except BaseException:
            self._file.close()
            raise

    def add(self, file: PackedFile) -> None:
        """Note, durably, that ``file`` is complete."""
        self.done[file.name] = file
        self._append([file.name, file.nbytes, file.sha256])

    def finish(self, output: Path) -> None:
        """Give the complete directory its name."""
        os.replace(self.directory, output)
        (output / _LIST).unlink()

    def close(self) -> None:
        """Let go of the lock; the directory stays."""
        self._file.close()

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UsageError(f"another process is packing into {self.directory}; wait for it or stop it") from None

    def _take_up(self, settings: dict[str, Any]) -> None:
        self._file.seek(0)
        whole, _, _ = self._file.read().rpartition(b"\n")  # a line without its end was being written when it died
        lines = [json.loads(line) for line in whole.splitlines()] if whole else []
        if lines and lines[0] != settings:
            raise UsageError(
                f"{self.directory} holds an unfinished packing of another model or with other settings "
                f"({json.dumps(lines[0])}); remove it, or pack with those settings"
            )
        self._file.truncate(len(whole) + bool(whole))
        if not lines:
            self._append(settings)
        for name, nbytes, digest in lines[1:]:
            path = self.directory / name
            if path.is_file() and path.stat().st_size == nbytes:
                self.done[name] = PackedFile(name, nbytes, digest)

    def _append(self, value: object) -> None:
        try:
            self._file.write(json.dumps(value).encode() + b"\n")
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise StorageError(f"cannot write into {self.directory}: {error.strerror}") from error
