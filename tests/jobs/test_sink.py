"""When results reach the kernel, and in which order they reach the disk."""

from __future__ import annotations

import asyncio
import itertools
import os
import threading
from pathlib import Path

import pytest

from batchgen_lite.errors import StorageError
from batchgen_lite.jobs.done_table import Status
from batchgen_lite.jobs.layout import JobPaths
from batchgen_lite.jobs.sink import ResultSink
from batchgen_lite.runtime.interface import SampledToken


def size(path: Path) -> int:
    return path.stat().st_size


def test_a_sweeps_tokens_are_with_the_kernel_before_the_next_sweep(tmp_path: Path) -> None:
    paths = JobPaths(tmp_path / "out")
    sink = ResultSink(paths)

    async def sweeps() -> list[int]:
        sizes = [size(paths.journal)]
        for _ in range(3):
            for row in range(100):
                sink.token(row, SampledToken(1), scored=False)
            assert size(paths.journal) == sizes[-1]  # not a write a token ...
            await asyncio.sleep(0)
            sizes.append(size(paths.journal))
        return sizes

    sizes = asyncio.run(sweeps())
    assert [after - before for before, after in itertools.pairwise(sizes)] == [9 + 100 * 8] * 3
    sink.close()


def test_a_record_is_with_the_kernel_at_once(tmp_path: Path) -> None:
    paths = JobPaths(tmp_path / "out")
    sink = ResultSink(paths)

    async def finish() -> None:
        sink.record(0, b"line\n", Status.STOPPED)
        assert paths.partial.read_bytes() == b"line\n"

    asyncio.run(finish())
    sink.close()


def test_records_are_synced_before_the_entries_that_name_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    twice = threading.Event()

    def fsync(fd: int) -> None:
        synced.append(Path(os.readlink(f"/proc/self/fd/{fd}")).suffix)
        if len(synced) >= 4:
            twice.set()

    monkeypatch.setattr(os, "fsync", fsync)
    sink = ResultSink(JobPaths(tmp_path / "out"), sync_seconds=0.001)
    assert twice.wait(30)
    sink.close()
    assert synced[:4] == [".partial", ".journal", ".partial", ".journal"]


def test_a_failed_sync_stops_the_run_from_the_other_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stopped = threading.Event()
    sink = ResultSink(JobPaths(tmp_path / "out"), sync_seconds=0.001)
    sink.on_fatal = stopped.set

    def fsync(fd: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", fsync)
    assert stopped.wait(30)
    assert isinstance(sink.fatal, StorageError)
    sink.record(0, b"line\n", Status.STOPPED)  # nothing is written any more
    sink.close()
    assert (tmp_path / "out.partial").read_bytes() == b""
