"""``doctor``: processor, memory, limits, power, versions. Imports no torch."""

from __future__ import annotations

import os
import platform
import re
import resource
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import psutil

from batchgen_lite import __version__
from batchgen_lite.cli.doctor_finding import Finding
from batchgen_lite.offload.budget import GIB, available_memory, default_ram_budget, format_size
from batchgen_lite.offload.budget_process import resident_bytes

FEATURES = ("avx2", "fma", "f16c", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "asimd", "bf16", "sve")
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
LEAST_BUDGET = 2 * GIB
LEAST_OPEN_FILES = 1024
OLDEST = {"torch": (2, 9), "triton": (3, 4)}
PACKAGES = ("torch", "triton", "numpy", "tokenizers", "gguf", "huggingface_hub", "kvikio-cu13", "transformers")


def versions() -> Iterator[Finding]:
    yield Finding("versions", "batchgen-lite", __version__)
    libc = " ".join(platform.libc_ver()).strip()
    yield Finding("versions", "python", f"{platform.python_version()}, {platform.system()} {platform.release()} {libc}")
    for name in PACKAGES:
        version = _version(name)
        yield Finding("versions", name, version or "not installed", _version_advice(name, version))


def processor(cpuinfo: Path = Path("/proc/cpuinfo")) -> Iterator[Finding]:
    text = cpuinfo.read_text() if cpuinfo.exists() else ""
    model = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    found = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", text, re.MULTILINE)
    flags = set(found[1].split()) if found else set()
    usable, present = len(os.sched_getaffinity(0)), psutil.cpu_count() or 1
    physical = psutil.cpu_count(logical=False)
    yield Finding(
        "processor",
        "cores",
        f"{model[1] if model else platform.machine()}; {usable} of {present} logical cores usable"
        + (f", {physical} physical" if physical else ""),
        data={"usable": usable, "logical": present, "physical": physical},
    )
    known = [name for name in FEATURES if name in flags]
    slow = platform.machine() in ("x86_64", "AMD64") and "avx2" not in flags
    yield Finding(
        "processor",
        "features",
        ", ".join(known) or "none of those that matter",
        "without AVX2 matrix products take several times longer; use a newer processor or a GPU" if slow else "",
        data={"features": known},
    )


def memory(huge_pages: Path = HUGE_PAGES) -> Iterator[Finding]:
    machine = psutil.virtual_memory()
    available = available_memory()
    budget = default_ram_budget(available, resident_bytes())
    yield Finding(
        "memory",
        "RAM",
        f"{format_size(machine.total)}, {format_size(machine.available)} available",
        data={"total": machine.total, "available": machine.available},
    )
    bound = available.bound_by != "the machine"
    yield Finding(
        "memory",
        "limit",
        f"{format_size(available.total)} by the {available.bound_by}" if bound else "none below the machine's RAM",
        data={"bytes": available.total if bound else None},
    )
    advice = ""
    if budget < LEAST_BUDGET:
        remedy = "raise the container's memory limit" if bound else "close other programs"
        advice = f"{remedy}: below {format_size(LEAST_BUDGET)} most models do not run, or only a few prompts at a time"
    yield Finding("memory", "default --ram", format_size(budget), advice, data={"bytes": budget})
    found = re.search(r"\[(\w+)\]", huge_pages.read_text()) if huge_pages.exists() else None
    mode = found[1] if found else None
    yield Finding(
        "memory",
        "huge pages",
        mode or "not in this kernel",
        f"reading costs the cores several times as much: echo madvise | sudo tee {HUGE_PAGES}"
        if mode == "never"
        else "",
        data={"mode": mode},
    )


def limits() -> Iterator[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    advice = ""
    if soft < LEAST_OPEN_FILES:
        advice = f"raise it before the run: ulimit -n {min(hard, 65_536)}" + (
            "" if hard >= LEAST_OPEN_FILES else f"; the hard limit of {hard} is set in /etc/security/limits.conf"
        )
    yield Finding("limits", "open files", f"{soft} (at most {hard})", advice, data={"soft": soft, "hard": hard})
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    unlimited = locked == resource.RLIM_INFINITY
    yield Finding(
        "limits",
        "locked memory",
        "unlimited" if unlimited else format_size(locked),
        data={"bytes": None if unlimited else locked},
    )


def power() -> Iterator[Finding]:
    battery = getattr(psutil, "sensors_battery", lambda: None)()
    if battery is None:
        yield Finding("power", "supply", "mains (no battery found)", data={"on_battery": False})
        return
    on_battery = not battery.power_plugged
    yield Finding(
        "power",
        "supply",
        f"battery at {battery.percent:.0f} %" if on_battery else "mains",
        "plug the machine in: on battery processor, GPU and disk run slower, and a batch may take hours"
        if on_battery
        else "",
        data={"on_battery": on_battery},
    )


def is_wsl(release: str | None = None) -> bool:
    """Windows Subsystem for Linux 2, by the kernel's name."""
    return "microsoft" in (platform.release() if release is None else release).lower()


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def _version_advice(name: str, version: str) -> str:
    if name not in OLDEST:
        return ""
    least = OLDEST[name]
    wanted = ".".join(map(str, least))
    if not version:
        if name == "triton" and platform.system() != "Linux":
            return ""
        return f"install it: pip install '{name}>={wanted}'"
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    return f"too old: pip install --upgrade '{name}>={wanted}'" if numbers < least else ""
