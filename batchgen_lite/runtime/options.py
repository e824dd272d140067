"""What a user may ask of an engine. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass, field

from batchgen_lite.offload.spill_file import SpillOptions
from batchgen_lite.runtime.planner import Overrides

KV_DTYPE_NAMES = ("auto", "float32", "bfloat16", "float16", "int8")
"""What the KV cache may be kept in; "auto" is the checkpoint's dtype."""


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """``ram``: ceiling of the process's memory in bytes, None = what the machine can spare; ``threads``: compute
    threads, None = one a physical core; ``kv_dtype``: one of KV_DTYPE_NAMES; ``device``: "auto" | "cpu" | "cuda" |
    "cuda:N" (or "sim"), ``vram``: ceiling of its memory in bytes where it has its own, None = what it can spare.
    ``spill``: where the KV of sequences that sit out may go, None = nowhere. ``overrides`` are for experiments and
    tests."""

    ram: int | None = None
    threads: int | None = None
    kv_dtype: str = "auto"
    device: str = "auto"
    vram: int | None = None
    spill: SpillOptions | None = None
    overrides: Overrides = field(default_factory=Overrides)
