"""Other machines, as numbers: profiles that ship with the package, or a file of one's own. Torch-free.

A profile is a JSON object:

    about       text
    available   memory that a job may use, as "27GiB" or bytes
    read_rate   bytes/s from the disk, sustained
    flops       FLOP/s of matrix products while the disk is read
    threads     cores that widen weights to fp32; 0 where kernels on an accelerator take them packed
    link_rate   bytes/s from memory to the accelerator; 0 without one
    sources     where each number comes from (for readers; not used)
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from batchgen_lite.errors import UsageError
from batchgen_lite.offload.budget import parse_size
from batchgen_lite.runtime.rates import MachineRates

_NUMBERS = {"read_rate": 1e5, "flops": 1e6, "threads": 0, "link_rate": 0}
"""Field -> least value. Below, somebody has mistaken the unit."""


@dataclass(frozen=True, slots=True)
class HardwareProfile:
    """A machine: its rates, and the bytes of memory that a job may use."""

    name: str
    about: str
    available: int
    rates: MachineRates


def profile_names() -> list[str]:
    """Names of the shipped profiles."""
    folder = files("batchgen_lite") / "hardware"
    return sorted(entry.name.removesuffix(".json") for entry in folder.iterdir() if entry.name.endswith(".json"))


def load_profile(name: str) -> HardwareProfile:
    """A shipped profile by name, or one from a file. UsageError if there is none or it is not a profile."""
    if name in profile_names():
        text = (files("batchgen_lite") / "hardware" / f"{name}.json").read_text(encoding="utf-8")
    else:
        try:
            text = Path(name).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not text"
            raise UsageError(
                f"--hardware {name}: {reason}; give a JSON file or one of {', '.join(profile_names())}"
            ) from None
    try:
        data = json.loads(text)
    except ValueError as error:
        raise UsageError(f"--hardware {name} is not JSON ({error})") from None
    return _profile(Path(name).stem if name not in profile_names() else name, data)


def _profile(name: str, data: Any) -> HardwareProfile:
    if not isinstance(data, Mapping):
        raise UsageError(f"--hardware {name} must be a JSON object with available, {', '.join(_NUMBERS)}")
    known = {"about", "available", "sources", *_NUMBERS}
    unknown = sorted(set(data) - known)
    if unknown:
        raise UsageError(f"--hardware {name}: {unknown[0]!r} is not known; fields are {', '.join(sorted(known))}")
    numbers = {field: _number(name, data, field) for field in _NUMBERS}
    if not numbers["threads"] and not numbers["link_rate"]:
        raise UsageError(f"--hardware {name}: threads is 0, which means an accelerator, but link_rate is 0 as well")
    rates = MachineRates(
        numbers["read_rate"], numbers["flops"], int(numbers["threads"]), numbers["link_rate"], f"profile {name}"
    )
    available = parse_size(str(data.get("available", "")), f"--hardware {name}: available")
    return HardwareProfile(name, str(data.get("about", "")), available, rates)


def _number(name: str, data: Mapping[str, Any], field: str) -> float:
    value = data.get(field, 0 if field == "link_rate" else None)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not _NUMBERS[field] <= value < 1e18:
        raise UsageError(
            f"--hardware {name}: {field} is {value!r}; it must be a number of at least {_NUMBERS[field]:g} "
            "(rates in bytes/s and FLOP/s)"
        )
    return float(value)
