"""What a user may name as a device, without torch: a command has to know whether its flags make sense, and a job what
decides its answers, before anything is loaded."""

from __future__ import annotations

from batchgen_lite.errors import UsageError
from batchgen_lite.offload.devices.auto import automatic


def device_kind(name: str) -> str:
    """Whether ``name`` ("auto", "cpu", "cuda", "cuda:N", "sim") is "cpu", "cuda" or "sim" on this machine. Raises
    UsageError for any other name."""
    if name == "auto":
        return "cpu" if automatic().card is None else "cuda"
    kind, colon, index = name.partition(":")
    if kind in ("cpu", "sim") and not colon:
        return kind
    if kind == "cuda" and (not colon or index.isdecimal()):
        return kind
    raise UsageError(f"--device is {name!r}: it must be auto, cpu, cuda, or cuda:N for the card of that number")


def card_index(name: str) -> int:
    """N of "cuda:N"; 0 where no number is given."""
    return int(name.partition(":")[2] or 0)


def check_vram(name: str, vram: int | None) -> None:
    """UsageError for ``vram`` where ``name`` has no memory of its own."""
    if vram is not None and device_kind(name) == "cpu":
        reason = automatic().reason if name == "auto" else ""
        raise UsageError(
            f"--vram {vram} is for a device with memory of its own, but --device {name} is the CPU here"
            f"{f' ({reason})' if reason else ''}: give --ram"
        )
