"""Sizes as users write them, the memory that is really there, and the budget that follows when none is given."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import psutil

from batchgen_lite.errors import UsageError
from batchgen_lite.offload.budget_cgroup import MemoryLimit, cgroup_limits

KIB, MIB, GIB, TIB = 1 << 10, 1 << 20, 1 << 30, 1 << 40

# IEC units are powers of 1024 and SI units of 1000; a bare letter is binary, as in Docker.
_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", start=1):
    _UNITS[_letter] = _UNITS[f"{_letter}ib"] = _UNITS[f"{_letter}i"] = 1024**_power
    _UNITS[f"{_letter}b"] = 1000**_power
_SIZE = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([A-Za-z]*)\s*", re.ASCII)

_LEAST_HEADROOM, _MOST_HEADROOM, _HEADROOM_SHARE = 128 * MIB, 2 * GIB, 0.10


def parse_size(text: str, option: str = "size") -> int:
    """Bytes of "1536MiB", "8GB" (10^9), "0.5g" (2^30), "1073741824". Raises UsageError, which names ``option``."""
    match = _SIZE.fullmatch(text)
    unit = match[2].lower() if match else ""
    if match is None or unit not in _UNITS:
        raise UsageError(
            f"{option}: {text!r} is not a size; write a number and a unit, as in 1536MiB, 8GB or 0.5g "
            f"(k m g t and KiB MiB GiB TiB count in 1024, KB MB GB TB in 1000), or plain bytes"
        )
    nbytes = round(float(match[1]) * _UNITS[unit]) if "." in match[1] else int(match[1]) * _UNITS[unit]
    if nbytes == 0:
        raise UsageError(f"{option}: {text!r} is no memory at all; give at least one byte")
    if nbytes >= 1 << 60:
        raise UsageError(f"{option}: {text!r} is more than any machine has; check the unit")
    return nbytes


def format_size(nbytes: int) -> str:
    """Bytes for people: "512 B", "1.5 KiB", "23.4 MiB", "7.81 GiB"; ``parse_size`` reads it back, rounded."""
    if abs(nbytes) < KIB:
        return f"{nbytes} B"
    units = ["KiB", "MiB", "GiB", "TiB"]
    value, unit = nbytes / 1024, units.pop(0)
    while abs(value) >= 1023.5 and units:
        value, unit = value / 1024, units.pop(0)
    digits = 2 if abs(value) < 10 else 1 if abs(value) < 100 else 0
    return f"{value:.{digits}f} {unit}"


@dataclass(frozen=True, slots=True)
class AvailableMemory:
    """``nbytes`` can be allocated now without swapping or being killed; ``total`` is the tightest limit's size, and
    ``bound_by`` names what decides: "the machine" or a cgroup limit."""

    nbytes: int
    total: int
    bound_by: str


def available_memory(limits: Sequence[MemoryLimit] | None = None) -> AvailableMemory:
    """The least of what the machine and every control group allow (``limits``: by default this process's own)."""
    machine = psutil.virtual_memory()
    available = AvailableMemory(int(machine.available), int(machine.total), "the machine")
    for limit in cgroup_limits() if limits is None else limits:
        if limit.available < available.nbytes:
            available = AvailableMemory(limit.available, min(limit.limit, available.total), limit.source)
    return available


def default_ram_budget(available: AvailableMemory, resident: int) -> int:
    """The budget in bytes for this process's whole resident size, when the user gives none.

    What can be allocated plus what is already held (``resident``), less headroom for the page tables, the disk's
    buffers and the neighbours: a tenth of the memory, at least 128 MiB and at most 2 GiB.
    """
    headroom = int(min(max(available.total * _HEADROOM_SHARE, _LEAST_HEADROOM), _MOST_HEADROOM))
    return max(0, available.nbytes + resident - headroom)
