"""Files that are truncated, overwritten, replaced or gone under a run: detected, never silently other weights."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from reading import submit_and_wait, write_file

from batchgen_lite.errors import StorageError
from batchgen_lite.offload.arena import Arena
from batchgen_lite.offload.readers.direct import DirectReader
from batchgen_lite.offload.readers.files import identify
from batchgen_lite.offload.readers.protocol import ReadPiece

SIZE = 20_001


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write_file(tmp_path / "shard.bin", SIZE)
    return tmp_path / "shard.bin"


def test_a_truncated_file_is_named_with_the_offset_where_it_ends(path: Path) -> None:
    was = identify(path)
    os.truncate(path, 10_000)
    reader = DirectReader([path], threads=1, block_bytes=4096)
    with Arena(65_536) as arena:
        error = submit_and_wait(reader, [ReadPiece(0, 0, was.size, arena.view, 0)])
    reader.close()
    assert isinstance(error, StorageError)
    assert f"{path} ends at offset 10000" in str(error)
    assert "truncated" in str(error)


def overwrite(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(6_000)
        file.write(b"other weights")


def touch_into_the_past(path: Path) -> None:
    overwrite(path)
    os.utime(path, ns=(0, 0))


def replace(path: Path) -> None:
    new = path.with_suffix(".new")
    write_file(new, SIZE, 7)
    os.utime(new, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns))
    new.replace(path)


def truncate(path: Path) -> None:
    os.truncate(path, 9_000)


def grow(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"x")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (overwrite, "it was written to"),
        (touch_into_the_past, "it was written to"),
        (truncate, "9000"),
        (grow, f"it has {SIZE + 1} bytes instead of {SIZE}"),
    ],
)
@pytest.mark.parametrize("direct", [True, False])
def test_a_file_changed_under_the_run_is_detected(
    path: Path, change: Callable[[Path], None], said: str, direct: bool
) -> None:
    # An hour old: a change within the same tick of the file system's clock would be invisible, and is not the point.
    os.utime(path, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns - 3_600_000_000_000))
    reader = DirectReader([path], direct=direct)
    with Arena(65_536) as arena:
        whole = [ReadPiece(0, 0, SIZE, arena.view, 0)]
        assert submit_and_wait(reader, whole) is None
        change(path)
        error = submit_and_wait(reader, whole)
        reader.close()
    assert isinstance(error, StorageError)
    assert said in str(error)
    assert str(path) in str(error)


def test_a_replaced_file_is_read_from_the_old_one_or_refused(path: Path, tmp_path: Path) -> None:
    old = path.read_bytes()
    other = tmp_path / "other.bin"
    write_file(other, SIZE, 1)
    reader = DirectReader([path, other], max_open=1)
    with Arena(65_536) as arena:
        whole = [ReadPiece(0, 0, SIZE, arena.view, 0)]
        assert submit_and_wait(reader, whole) is None
        replace(path)
        arena.tensor.zero_()
        assert submit_and_wait(reader, whole) is None
        assert bytes(arena.view[:SIZE]) == old, "the descriptor still holds the file that was indexed"
        assert submit_and_wait(reader, [ReadPiece(1, 0, SIZE, arena.view, 0)]) is None
        error = submit_and_wait(reader, whole)  # opened anew
        reader.close()
    assert isinstance(error, StorageError)
    assert "replaced by another file" in str(error)


def test_a_file_other_than_the_indexed_one_is_refused(path: Path) -> None:
    indexed = identify(path)
    replace(path)
    reader = DirectReader([path], expected=[indexed])
    with Arena(65_536) as arena:
        error = submit_and_wait(reader, [ReadPiece(0, 0, SIZE, arena.view, 0)])
        reader.close()
    assert isinstance(error, StorageError)
    assert "replaced by another file" in str(error)


def test_a_file_that_vanishes_before_its_first_read(path: Path) -> None:
    reader = DirectReader([path])
    path.unlink()
    with Arena(65_536) as arena:
        error = submit_and_wait(reader, [ReadPiece(0, 0, SIZE, arena.view, 0)])
        reader.close()
    assert isinstance(error, StorageError)
    assert f"cannot open {path}: No such file" in str(error)
