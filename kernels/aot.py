"""Ahead-of-time compilation of the kernels for cards that are not here, and what the compiler made of them.

    python -m batchgen_lite.kernels.aot [--write | --output FILE] [--only TEXT] [--jobs N]

Compiles the launches of ``aot_cases.py`` (the real launchers, called on ``meta`` tensors) and reports shared memory,
registers and stack bytes of each: a kernel's stack holds what does not fit into registers, so any of it is a spill.
``--write`` replaces the checked-in table ``compiled.json``, which tests/kernels/test_compile.py compares with. Needs
no GPU; TRITON_INTERPRET must not be set, because interpreted functions cannot be compiled.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from batchgen_lite.kernels.availability import interpreted
from batchgen_lite.kernels.launch import Launch

TABLE = Path(__file__).with_name("compiled.json")
SHARED_LIMIT = 99 * 1024
"""Bytes of shared memory that one program may use on a consumer card (CUDA C++ programming guide)."""

_TYPES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.int32: "i32",
    torch.int64: "i64",
}


Build = Callable[[], Launch]


@dataclass(frozen=True, slots=True)
class Resources:
    """What one program of a compiled kernel takes. ``shared`` and ``stack`` in bytes, ``registers`` per thread."""

    shared: int
    registers: int
    stack: int


@dataclass(frozen=True, slots=True)
class Case:
    """A launch to compile for a compute capability (89 is 8.9)."""

    name: str
    capability: int
    launch: Build

    @property
    def key(self) -> str:
        return f"{self.name}/sm_{self.capability}"


def signature(launch: Launch) -> tuple[dict[str, str], dict[str, Any], dict[tuple[int, ...], Any]]:
    """(types, constants, hints) of a launch's arguments, specialised as the launch on a card would specialise them."""
    types: dict[str, str] = {}
    constants: dict[str, Any] = {}
    hints: dict[tuple[int, ...], Any] = {}
    for index, parameter in enumerate(launch.kernel.params):
        name, value = parameter.name, launch.arguments[parameter.name]
        specialised = type(value) is int and not parameter.do_not_specialize
        if parameter.is_constexpr or value is None or (specialised and value == 1):
            types[name], constants[name] = "constexpr", value
            continue
        types[name] = _type(value)
        if _aligned(value) if isinstance(value, torch.Tensor) else specialised and value % 16 == 0:
            hints[(index,)] = [["tt.divisibility", 16]]
    return types, constants, hints


def _aligned(tensor: torch.Tensor) -> bool:
    """Allocators align to far more than 16 bytes, so only a view's offset can break it."""
    return tensor.storage_offset() * tensor.element_size() % 16 == 0


def _type(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return "*" + _TYPES[value.dtype]
    if isinstance(value, float):
        return "fp32"
    return "i32" if -(2**31) <= value < 2**31 else "i64"


def compile_launch(launch: Launch, capability: int) -> Resources:
    """Compile for ``sm_<capability>``. Whatever the compiler refuses is raised as it comes."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    types, constants, hints = signature(launch)
    source = ASTSource(launch.kernel, types, constants, hints)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=launch.options)
    registers, stack = _usage(compiled.asm["cubin"])
    return Resources(compiled.metadata.shared, registers, stack)


def _usage(cubin: bytes) -> tuple[int, int]:
    """(registers, stack bytes), as the cuobjdump that comes with triton reads them from the binary."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    if found is None:
        raise RuntimeError(f"cuobjdump printed no register usage: {text!r}; compare its version with triton's")
    return int(found[1]), int(found[2])


def _measure(key: str) -> tuple[str, dict[str, int] | str]:
    from batchgen_lite.kernels.aot_cases import cases

    case = next(case for case in cases() if case.key == key)
    try:
        return key, asdict(compile_launch(case.launch(), case.capability))
    except Exception as error:  # a compiler failure of one case is a result of that case
        return key, f"{type(error).__name__}: {error}"[:2000]


def measure(keys: Iterable[str], jobs: int) -> dict[str, dict[str, int] | str]:
    """Resources, or the compiler's message, by case. ``jobs`` processes; one process per ~40 cases bounds memory."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(jobs, maxtasksperchild=40) as pool:
        return dict(pool.imap_unordered(_measure, keys))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Compile the kernels ahead of time and report what they take.")
    parser.add_argument("--write", action="store_true", help="replace the checked-in table")
    parser.add_argument("--output", type=Path, help="write the result here as JSON")
    parser.add_argument("--only", default="", help="only cases whose name contains this")
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args(arguments)
    if interpreted():
        parser.error("TRITON_INTERPRET is set: interpreted functions cannot be compiled; unset it")
    import triton

    from batchgen_lite.kernels.aot_cases import cases

    keys = [case.key for case in cases() if options.only in case.key]
    measured = measure(keys, options.jobs)
    if options.write and options.only and TABLE.exists():
        measured = json.loads(TABLE.read_text(encoding="utf-8"))["cases"] | measured
    report = {"triton": triton.__version__, "cases": dict(sorted(measured.items()))}
    text = json.dumps(report, indent=1) + "\n"
    target = TABLE if options.write else options.output
    if target is not None:
        target.write_text(text, encoding="utf-8")
    else:
        sys.stdout.write(text)
    return 1 if any(isinstance(result, str) for result in measured.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
