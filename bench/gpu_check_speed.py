"""What the card and the way to it can do: copies, disk, every kernel against the limits, GPUDirect Storage."""

from __future__ import annotations

import platform
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from gpu_check import Context, Line
from kernel_rates import card_rates, measure, row
from kernel_workloads import workloads

from batchgen_lite.kernels.availability import unavailable_reason
from batchgen_lite.offload.arena import Arena
from batchgen_lite.offload.readers.direct import DirectReader
from batchgen_lite.offload.readers.kvikio_probe import gds_state, why_unavailable
from batchgen_lite.offload.readers.protocol import ReadPiece

BLOCK = 8 << 20


def machine(context: Context) -> Iterator[Line]:
    import triton

    yield Line("python, torch, triton", f"{sys.version.split()[0]}, {torch.__version__}, {triton.__version__}")
    yield Line("system", platform.platform())
    device = torch.device(context.device)
    if context.dry:
        yield Line("card", "none: a dry run on the CPU")
        return
    properties = torch.cuda.get_device_properties(device)
    free, total = torch.cuda.mem_get_info(device)
    yield Line(
        "card",
        f"{properties.name}, capability {properties.major}.{properties.minor}, {properties.multi_processor_count} SMs, "
        f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB free, CUDA {torch.version.cuda}",
        data={"name": properties.name, "capability": [properties.major, properties.minor]},
    )
    reason = unavailable_reason(device)
    yield Line("Triton kernels", reason or "can be used", reason is None)


def seconds_of(work: Callable[[], object], synchronize: Callable[[], object], repeats: int = 5) -> float:
    """The best of a few: others use the bus, too."""
    work()
    synchronize()
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        work()
        synchronize()
        times.append(time.perf_counter() - began)
    return min(times)


def link_rate(context: Context, nbytes: int = 1 << 30) -> float:
    """Bytes/s from pinned host memory to the card; of a dry run what the host copies."""
    if context.dry:
        source, target = torch.ones(1 << 20, dtype=torch.uint8), torch.empty(1 << 20, dtype=torch.uint8)
        return source.numel() / seconds_of(lambda: target.copy_(source), lambda: None)
    source = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(nbytes, dtype=torch.uint8, device=context.device)
    return nbytes / seconds_of(lambda: target.copy_(source, non_blocking=True), torch.cuda.synchronize)


def links(context: Context) -> Iterator[Line]:
    rate = link_rate(context)
    yield Line("host to device, pinned by torch", f"{rate / 1e9:.1f} GB/s", data={"bytes_per_second": rate})
    if not context.dry:
        yield from our_pinning(context)
        yield from out_and_within(context)
    rate, what = disk_rate(context)
    yield Line(f"disk, {what}", f"{rate / 1e9:.2f} GB/s", data={"bytes_per_second": rate})


def our_pinning(context: Context, nbytes: int = 1 << 30) -> Iterator[Line]:
    """Arenas pinned in place, as rings are; and whether refusing leaves no error behind."""
    from batchgen_lite.offload.devices.cuda_streams import TorchStreams
    from batchgen_lite.offload.devices.pinned import PinnedMemory

    index = torch.device(context.device).index or 0
    layer = TorchStreams(index)
    memory = PinnedMemory(layer)
    arena = memory.arena(nbytes)
    target = torch.empty(nbytes, dtype=torch.uint8, device=context.device)
    rate = nbytes / seconds_of(lambda: target.copy_(arena.tensor, non_blocking=True), torch.cuda.synchronize)
    yield Line(
        "host to device, arena pinned in place", f"{rate / 1e9:.1f} GB/s; {memory.describe()}", not memory.refused
    )
    refused = layer.pin(arena.address, nbytes)  # a second time
    survived = float(torch.ones(4, device=context.device).sum()) == 4.0
    yield Line("pinning twice", f"{refused}; the next kernel runs: {survived}", refused is not None and survived)
    arena.close()


def out_and_within(context: Context, nbytes: int = 1 << 30) -> Iterator[Line]:
    host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    card, other = (torch.empty(nbytes, dtype=torch.uint8, device=context.device) for _ in range(2))
    rate = nbytes / seconds_of(lambda: host.copy_(card, non_blocking=True), torch.cuda.synchronize)
    yield Line("device to host, pinned", f"{rate / 1e9:.1f} GB/s", data={"bytes_per_second": rate})
    rate = 2 * nbytes / seconds_of(lambda: other.copy_(card), torch.cuda.synchronize)
    yield Line("within the device", f"{rate / 1e9:.0f} GB/s read and written", data={"bytes_per_second": rate})


def disk_rate(context: Context, most: int = 4 << 30) -> tuple[float, str]:
    """Bytes/s by our reader from the largest file of the work directory, and how it read."""
    files = sorted(context.work.rglob("*.safetensors"), key=lambda file: file.stat().st_size)
    if not files:
        files = [context.work / "disk.safetensors"]
        with files[0].open("wb") as file:
            for _ in range(1 if context.dry else 256):
                file.write(b"\x5a" * BLOCK)
    path, size = files[-1], files[-1].stat().st_size
    block = min(BLOCK, size // 4096 * 4096) or 4096
    count = max(1, min(most, size) // block)
    reader = DirectReader([path], threads=4 if context.dry else 16, block_bytes=min(block, 2 << 20))
    slots = min(count, 64)
    arena = Arena(slots * block + 4096)
    done, left = threading.Event(), [count]
    began = time.perf_counter()

    def finished(error: BaseException | None) -> None:
        left[0] -= 1
        if left[0] <= 0 or error is not None:
            done.set()

    for number in range(count):
        piece = ReadPiece(0, number * block, min(block, size - number * block), arena.view, number % slots * block)
        reader.submit([piece], finished)
    done.wait(60)
    rate = count * block / (time.perf_counter() - began)
    how = "direct" if not reader.statistics().buffered_files else f"buffered ({reader.statistics().fallback_reason})"
    reader.close()
    arena.close()
    return rate, f"{how} reads of {path.name}"


def kernels(context: Context) -> Iterator[Line]:
    """As bench/kernels.py; of a dry run the bytes and operations alone."""
    dtype = torch.bfloat16
    device = torch.device("meta" if context.dry else context.device)
    copy, rate = (256e9, 60e12) if context.dry else card_rates(device, dtype, 5)
    yield Line("limits", f"{copy / 1e9:.0f} GB/s of a device copy, {rate / 1e12:.1f} TFLOP/s of a cuBLAS product")
    for work in workloads(device, dtype):
        if context.left() < 0:
            yield Line("the rest", "left out: the time is over")
            return
        seconds = None if context.dry else measure(work, device, 5)
        figures = row(work, seconds, copy, rate)
        text = f"{figures['MB']:.1f} MB, {figures['GFLOP']:.1f} GFLOP, bound by {figures['bound']}"
        if seconds is not None:
            text += (
                f": {figures['GB_per_s']:.0f} GB/s, {figures['TFLOP_per_s']:.1f} TFLOP/s, "
                f"{100 * float(str(figures['share'])):.0f} % of the limit"
            )
        yield Line(work.name, text, data=figures)


def gds(context: Context) -> Iterator[Line]:
    path: Path | None = next(iter(sorted(context.work.rglob("*.safetensors"))), None)
    reason = why_unavailable(path)
    yield Line("kvikio", reason or "reads from this disk")
    if not reason:
        works, why = gds_state(path)
        yield Line("GPUDirect Storage", f"{'works' if works else 'does not work'}: {why}")
