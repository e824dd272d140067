"""One measurement of a probe: read a window of the checkpoint while all compute threads multiply matrices."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from batchgen_lite.kernels.products import product
from batchgen_lite.offload.arena import Arena
from batchgen_lite.offload.budget import MIB
from batchgen_lite.offload.checkpoint.tensors import Extent
from batchgen_lite.offload.probe_result import ReaderSetting
from batchgen_lite.offload.readers.protocol import Reader, ReadPiece
from batchgen_lite.offload.readers.select import open_reader

SUBMISSION_BYTES = 8 * MIB
"""A tile's size: what a sweep submits at a time."""
SLOTS = 4
"""Submissions in flight; their memory is SLOTS * SUBMISSION_BYTES."""
LONGEST = 1.5
"""Seconds after which a window is given up on: a slow disk needs no more bytes to be measured."""
ALONE = 0.25
"""Seconds of computing with nothing beside it."""

# An expert's shapes at a middling batch: [out, in] x [in, tokens].
_OUT, _IN, _TOKENS = 1024, 1024, 64
_FLOPS_PER_PRODUCT = 2 * _OUT * _IN * _TOKENS


@dataclass(frozen=True, slots=True)
class Rates:
    """What was measured: bytes/s, FLOP/s, and the bytes read for it."""

    read_rate: float
    flops: float
    bytes_read: int


@dataclass(frozen=True, slots=True)
class CpuSeconds:
    """Core seconds since boot: idle ones, all of them, and those that this process has used."""

    idle: float
    total: float
    own: float

    def disturbance_since(self, before: CpuSeconds) -> float:
        """The share of all core time that went neither to this process nor to waiting; from 0 to 1."""
        total = self.total - before.total
        others = total - (self.idle - before.idle) - (self.own - before.own)
        return min(1.0, max(0.0, others / total)) if total > 0 else 0.0


def cpu_seconds() -> CpuSeconds:
    """Now. Left out is what reading itself causes without being this process's time: interrupts, and in a virtual
    machine the time that the hypervisor takes (steal) while it serves the virtual disk."""
    everyone, own = psutil.cpu_times(), psutil.Process().cpu_times()
    # guest time is counted in user time already
    others = ("guest", "guest_nice", "irq", "softirq", "steal")
    total = sum(everyone) - sum(getattr(everyone, name, 0.0) for name in others)
    idle = everyone.idle + getattr(everyone, "iowait", 0.0)
    return CpuSeconds(idle, total, own.user + own.system)


class Region:
    """Hands out windows of the files, one behind the other and round again, so that no trial finds its bytes in a
    disk's own cache as long as the checkpoint is larger than the probe."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._extents = [
            Extent(number, offset, min(SUBMISSION_BYTES, size - offset))
            for number, size in enumerate(path.stat().st_size for path in paths)
            for offset in range(0, size, SUBMISSION_BYTES)
        ]
        self._next = 0

    def next(self, nbytes: int) -> list[Extent]:
        """Extents of about ``nbytes`` in all, at least one."""
        window: list[Extent] = []
        while not window or sum(extent.nbytes for extent in window) + SUBMISSION_BYTES <= nbytes:
            window.append(self._extents[self._next % len(self._extents)])
            self._next += 1
        return window


def measure(paths: Sequence[Path], setting: ReaderSetting, compute_threads: int, window: Sequence[Extent]) -> Rates:
    """Read the window with ``setting`` while ``compute_threads`` compute. Raises StorageError if reading fails."""
    load = ComputeLoad(compute_threads)
    load.start()
    try:
        read_rate, nbytes = _read_window(paths, setting, window)
    finally:
        flops = load.stop()
    return Rates(read_rate, flops, nbytes)


def read_window(paths: Sequence[Path], setting: ReaderSetting, window: Sequence[Extent]) -> float:
    """Bytes/s of reading the window while nothing else is done. Raises StorageError if reading fails."""
    return _read_window(paths, setting, window)[0]


def _read_window(paths: Sequence[Path], setting: ReaderSetting, window: Sequence[Extent]) -> tuple[float, int]:
    """(bytes/s, bytes)."""
    forget(paths, window)
    opened = open_reader(setting.kind, paths, threads=setting.threads, block_bytes=setting.block_bytes)
    with Arena(SLOTS * SUBMISSION_BYTES) as arena:
        arena.tensor.zero_()  # page faults are not the disk's fault
        try:
            began = time.perf_counter()
            arrivals = _read(opened.reader, window, arena.view, began + LONGEST)
        finally:
            opened.reader.close()
    return sustained_rate(began, arrivals), sum(nbytes for _, nbytes in arrivals)


def forget(paths: Sequence[Path], window: Sequence[Extent]) -> None:
    """Drop the window from the page cache: a checkpoint that was fetched a minute ago may lie there, and what a
    buffered reader then measures is not the disk. Pages that are still to be written stay."""
    for number in sorted({extent.file for extent in window}):
        with paths[number].open("rb") as file:
            for extent in window:
                if extent.file == number:
                    os.posix_fadvise(file.fileno(), extent.offset, extent.nbytes, os.POSIX_FADV_DONTNEED)


def sustained_rate(began: float, arrivals: Sequence[tuple[float, int]]) -> float:
    """Bytes/s of the second half of the ``arrivals`` (time, bytes), of all of them where there are only a few.

    A quota on the disk, of a control group or of a cloud volume, lets a first burst pass at full speed; what a sweep
    gets is what comes behind it."""
    ordered = sorted(arrivals)
    skipped = len(ordered) // 2 if len(ordered) >= 2 * SLOTS else 0
    since = ordered[skipped - 1][0] if skipped else began
    return sum(nbytes for _, nbytes in ordered[skipped:]) / max(1e-9, ordered[-1][0] - since)


def _read(reader: Reader, window: Sequence[Extent], arena: memoryview, deadline: float) -> list[tuple[float, int]]:
    """When each submission arrived, and its bytes; at least one, none begun after the deadline. SLOTS are kept in
    flight."""
    free = threading.Semaphore(SLOTS)
    errors: list[BaseException] = []
    arrivals: list[tuple[float, int]] = []

    for number, extent in enumerate(window):
        free.acquire()
        if errors or (number and time.perf_counter() > deadline):
            free.release()
            break

        def done(error: BaseException | None, nbytes: int = extent.nbytes) -> None:
            if error is not None:
                errors.append(error)
            arrivals.append((time.perf_counter(), nbytes))
            free.release()

        position = number % SLOTS * SUBMISSION_BYTES
        reader.submit([ReadPiece(extent.file, extent.offset, extent.nbytes, arena, position)], done)
    for _ in range(SLOTS):
        free.acquire()
    if errors:
        raise errors[0]
    return arrivals


def measure_alone(compute_threads: int) -> float:
    """FLOP/s of ``compute_threads`` while nothing is read."""
    load = ComputeLoad(compute_threads)
    load.start()
    time.sleep(ALONE)
    return load.stop()


class ComputeLoad:
    """Matrix products in a loop on torch's threads until stopped; the process's thread count is put back."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._before = torch.get_num_threads()
        self._flops = 0.0
        self._stop = threading.Event()
        self._warm = threading.Event()
        self._thread = threading.Thread(target=self._run, name="probe-compute", daemon=True)

    def start(self) -> None:
        """Returns when the first product is done, so that starting torch's threads is not measured."""
        torch.set_num_threads(self._threads)
        self._thread.start()
        self._warm.wait()

    def stop(self) -> float:
        """Ends the loop; FLOP/s since ``start``."""
        self._stop.set()
        self._thread.join()
        torch.set_num_threads(self._before)
        return self._flops

    def _run(self) -> None:
        weights, tokens = torch.ones(_OUT, _IN), torch.ones(_TOKENS, _IN)
        product(weights, tokens)
        self._warm.set()
        products, began = 0, time.perf_counter()
        # At least one, and to its end: on a busy machine a product may take longer than the window.
        while not products or not self._stop.is_set():
            product(weights, tokens)
            products += 1
        self._flops = products * _FLOPS_PER_PRODUCT / (time.perf_counter() - began)
