"""``doctor``: the disk that a model lies on, how fast it is read, and GPUDirect Storage."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from batchgen_lite.cli.doctor_finding import Finding
from batchgen_lite.errors import BatchGenError
from batchgen_lite.offload.budget import GIB, MIB, format_size
from batchgen_lite.offload.checkpoint.open import open_checkpoint
from batchgen_lite.offload.checkpoint.packed_directory import is_packed
from batchgen_lite.offload.probe_disk import disk_of
from batchgen_lite.offload.readers.alignment import direct_alignment
from batchgen_lite.offload.readers.kvikio_probe import gds_state

DEPTHS = (1, 4, 16)
BLOCK_BYTES = 1 * MIB
BYTES_PER_DEPTH = 48 * MIB
SLOW_DISK = 500e6
"""Bytes/s. Below, a sweep over 20 GiB of weights takes 40 s and more."""

_KIND_ADVICE = {
    "hdd": "a rotating disk reads about 200 MiB/s: copy the model to an SSD",
    "network": "weights would cross the network in every sweep: copy the model to a local disk (in WSL: one of Linux)",
    "memory": "files on it take RAM themselves: copy the model to a disk",
}


def model_files(model: Path) -> Iterator[Finding]:
    """The checkpoint itself."""
    try:
        checkpoint = open_checkpoint(model)
    except BatchGenError as error:
        yield Finding("model", "checkpoint", str(error), "repair or download the model again; see the message")
        return
    nbytes = sum(file.size for file in checkpoint.files)
    yield Finding(
        "model",
        "checkpoint",
        f"{checkpoint.format}, {len(checkpoint.files)} files, {len(checkpoint.tensors)} tensors, {format_size(nbytes)}",
        data={"format": checkpoint.format, "files": len(checkpoint.files), "bytes": nbytes},
    )


def weight_files(model: Path) -> list[Path]:
    """The model's weight files, also of a checkpoint that cannot be opened; [] if there are none."""
    if model.is_file():
        return [model]
    if is_packed(model):
        return sorted(model.glob("*.bin"))
    return sorted([*model.glob("*.safetensors"), *model.glob("*.gguf")])


def disk(path: Path) -> Iterator[Finding]:
    found = disk_of(path)
    name = " ".join(part for part in (found.name, found.model) if part)
    kind = f"{found.kind} ({name})" if name else found.kind
    yield Finding(
        "disk",
        "type",
        f"{kind}, {found.filesystem or 'unknown file system'} on {found.mount_point}",
        _KIND_ADVICE.get(found.kind, ""),
        data={"kind": found.kind, "device": found.name, "filesystem": found.filesystem},
    )
    alignment = direct_alignment(path)
    refused = alignment == 0
    known = f"yes, aligned to {alignment} bytes" if alignment else "the kernel does not say; tried at the first read"
    yield Finding(
        "disk",
        "direct reads",
        "no" if refused else known,
        "reads go through the page cache, which costs time and memory: put the model on ext4, xfs or btrfs"
        if refused
        else "",
        data={"alignment": alignment},
    )


def read_rates(paths: list[Path]) -> Iterator[Finding]:
    """Plain direct reads at several depths, the cores idle."""
    from batchgen_lite.offload.probe_measure import Region, read_window
    from batchgen_lite.offload.probe_result import ReaderSetting

    region = Region(paths)
    rates: dict[int, float] = {}
    for depth in DEPTHS:
        rates[depth] = read_window(paths, ReaderSetting("direct", depth, BLOCK_BYTES), region.next(BYTES_PER_DEPTH))
    fastest = max(rates.values())
    yield Finding(
        "disk",
        "read rate",
        ", ".join(f"{format_size(round(rate))}/s {depth} deep" for depth, rate in rates.items()),
        f"a sweep over 20 GiB of weights takes {20 * GIB / fastest:.0f} s at this rate: use an NVMe disk"
        if fastest < SLOW_DISK
        else "",
        data={"bytes_per_second": {str(depth): rate for depth, rate in rates.items()}},
    )


def probe_choice(paths: list[Path], *, refresh: bool) -> Iterator[Finding]:
    """What a run would use, measured while the cores work."""
    from batchgen_lite.offload.probe import DISTURBED, probe
    from batchgen_lite.offload.probe_cache import ProbeCache

    result = probe(paths, cache=ProbeCache(), refresh=refresh)
    setting = result.setting
    choice = f"{setting.kind}, {setting.threads} threads x {format_size(setting.block_bytes)}"
    if result.source == "default":
        yield Finding("disk", "reader", f"{choice} (the model is too small to measure)")
        return
    disturbed = result.disturbance >= DISTURBED
    yield Finding(
        "disk",
        "reader",
        f"{choice}; {format_size(round(result.read_rate))}/s while computing at "
        f"{result.flops / 1e9:.0f} GFLOP/s with --threads {result.compute_threads} ({result.source})",
        f"other programs took {result.disturbance:.0%} of the cores while this was measured: end them, run doctor again"
        if disturbed
        else "",
        data=result.to_json(),
    )


def gpudirect(path: Path | None) -> Iterator[Finding]:
    available, found = gds_state(path)
    answer = "yes" if available else "no"
    yield Finding("disk", "GPUDirect Storage", f"{answer}: {found}", data={"available": available})
