"""Runs in a process of its own, with the real kvikio and a stub driver: drives KvikioReader and prints what happened.

Usage: kvikio_session.py SCENARIO FILE. A scenario checks bytes itself and prints one JSON object for the test.
"""

from __future__ import annotations

import importlib
import json
import mmap
import os
import random
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from reading import DEADLINE, submit_and_wait

from batchgen_lite.errors import StorageError, UsageError
from batchgen_lite.offload.checkpoint.tensors import Extent
from batchgen_lite.offload.readers.kvikio_reader import DevicePiece, KvikioReader
from batchgen_lite.offload.readers.placement import place
from batchgen_lite.offload.readers.protocol import ReadPiece
from batchgen_lite.offload.readers.select import open_reader


def host_arena(nbytes: int) -> memoryview:
    return memoryview(mmap.mmap(-1, nbytes))


def reading(path: Path) -> dict[str, Any]:
    """Placed extents of every kind, then pieces that break the placement rules, then many submissions at once."""
    content, size = path.read_bytes(), path.stat().st_size
    generator = random.Random(1)
    extents = [Extent(0, 0, size), Extent(0, size - 5, 5), Extent(0, 4096, 4096)]
    for _ in range(40):
        offset = generator.randrange(size)
        extents.append(Extent(0, offset, min(size - offset, generator.randrange(1, 200_000))))
    reader = KvikioReader([path], threads=3, task_bytes=65_536)
    placement = place(extents, 0, reader.alignment)
    arena = host_arena(placement.end)
    pieces = [ReadPiece(0, e.offset, e.nbytes, arena, p) for e, p in zip(extents, placement.positions, strict=True)]
    assert submit_and_wait(reader, pieces) is None
    for extent, position in zip(extents, placement.positions, strict=True):
        wanted = content[extent.offset : extent.offset + extent.nbytes]
        assert arena[position : position + extent.nbytes] == wanted, extent
    small = memoryview(bytearray(b"\xaa" * 1002))
    assert submit_and_wait(reader, [ReadPiece(0, 7, 1000, small, 1)]) is None
    assert bytes(small) == b"\xaa" + content[7:1007] + b"\xaa"
    assert submit_and_wait(reader, []) is None
    statistics = reader.statistics()
    reader.close()
    reader.close()
    defaults = importlib.import_module("kvikio.defaults")
    return {
        "name": reader.name,
        "asked": statistics.bytes_asked == sum(e.nbytes for e in extents) + 1000,
        "read_at_least_asked": statistics.bytes_read >= statistics.bytes_asked,
        "busy": statistics.busy_seconds > 0,
        "settings": [defaults.get(key) for key in ("num_threads", "task_size", "auto_direct_io_read")],
        "closed": str(submit_and_wait(reader, [ReadPiece(0, 0, 1, small, 0)])),
    }


class FakeDeviceMemory:
    """Host bytes that look like a CUDA array; the stub driver says that their address is the host's."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self.array = array

    def __len__(self) -> int:
        return len(self.array)

    def __getitem__(self, index: slice) -> FakeDeviceMemory:
        return FakeDeviceMemory(self.array[index])

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {**self.array.__array_interface__, "strides": None, "version": 3}


def device(path: Path) -> dict[str, Any]:
    memory = FakeDeviceMemory(np.full(100_000, 0xAA, np.uint8))
    reader = KvikioReader([path])
    finished, outcome = threading.Event(), []
    pieces = [DevicePiece(0, 4096, 50_000, memory, 0), DevicePiece(0, 3, 100, memory, 60_001)]
    reader.submit_to_device(pieces, lambda error: (outcome.append(error), finished.set())[1])
    assert finished.wait(DEADLINE)
    assert outcome == [None], outcome
    content = path.read_bytes()
    try:
        reader.submit_to_device([DevicePiece(0, 0, 10, memory, 99_991)], print)
        refused = ""
    except ValueError as error:
        refused = str(error)
    reader.close()
    return {
        "first": bytes(memory.array[:50_001]) == content[4096:54_096] + b"\xaa",
        "second": bytes(memory.array[60_000:60_102]) == b"\xaa" + content[3:103] + b"\xaa",
        "refused": refused,
    }


def faults(path: Path) -> dict[str, Any]:
    """The file shrinks, then is written to; a file is missing."""
    os.utime(path, ns=(0, path.stat().st_mtime_ns - 3_600_000_000_000))
    size = path.stat().st_size
    arena = host_arena(size + 8192)
    whole = [ReadPiece(0, 0, size, arena, 0)]
    outcome: dict[str, Any] = {}

    def error_of(reader: KvikioReader) -> str:
        error = submit_and_wait(reader, whole)
        assert isinstance(error, StorageError), error
        reader.close()
        return str(error)

    reader = KvikioReader([path])
    assert submit_and_wait(reader, whole) is None
    os.truncate(path, 100_000)
    outcome["truncated"] = error_of(reader)
    os.truncate(path, size)
    reader = KvikioReader([path])
    assert submit_and_wait(reader, whole) is None
    with path.open("r+b") as file:
        file.write(b"other")
    outcome["written"] = error_of(reader)
    reader = KvikioReader([path])
    path.unlink()
    outcome["missing"] = error_of(reader)
    return outcome


def selection(path: Path) -> dict[str, Any]:
    """What each kind gives here."""
    outcome: dict[str, Any] = {}
    for kind in ("auto", "kvikio", "direct", "buffered"):
        try:
            opened = open_reader(kind, [path], threads=2, block_bytes=1 << 20)
        except UsageError as error:
            outcome[kind] = ["refused", str(error)]
            continue
        arena = host_arena(8192)
        assert submit_and_wait(opened.reader, [ReadPiece(0, 100, 5000, arena, 100)]) is None
        assert arena[100:5100] == path.read_bytes()[100:5100]
        opened.reader.close()
        outcome[kind] = [opened.reader.name, opened.reason]
    return outcome


SCENARIOS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "reading": reading,
    "device": device,
    "faults": faults,
    "selection": selection,
}

if __name__ == "__main__":
    sys.stdout.write(json.dumps(SCENARIOS[sys.argv[1]](Path(sys.argv[2]))))
