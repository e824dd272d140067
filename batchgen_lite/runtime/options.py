"""What a user may ask of an engine. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass, field

from batchgen_lite.runtime.planner import Overrides


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """``ram``: ceiling of the process's memory in bytes, None = what the machine can spare; ``threads``: compute
    threads, None = one a physical core. ``overrides`` are for experiments and tests."""

    ram: int | None = None
    threads: int | None = None
    overrides: Overrides = field(default_factory=Overrides)
