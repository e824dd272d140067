"""``plan``: the model, the machine and the budget as a run would find them. Imports torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from batchgen_lite.models.load import load_model
from batchgen_lite.offload.budget import available_memory, default_ram_budget
from batchgen_lite.offload.budget_process import resident_bytes
from batchgen_lite.runtime.hardware import HardwareProfile
from batchgen_lite.runtime.interface import RequestSize
from batchgen_lite.runtime.job_plan import Situation
from batchgen_lite.runtime.machine import look_at_machine
from batchgen_lite.runtime.model_size import described_size


def describe_situation(
    path: Path,
    sizes: Sequence[RequestSize],
    ram: int | None,
    threads: int | None,
    profile: HardwareProfile | None,
    expected: float | None,
    kv_dtype: str = "auto",
) -> Situation:
    """``ram`` in bytes, None = what this machine, or the profile's, can spare; ``kv_dtype`` as EngineOptions has it.
    ModelError, StorageError."""
    model = load_model(path)
    size = described_size(model, kv_dtype=kv_dtype)
    if profile is not None:
        rates, budget = profile.rates, profile.available
    else:
        rates = look_at_machine([file.path for file in model.checkpoint.files], threads).rates
        budget = default_ram_budget(available_memory(), resident_bytes())
    process = resident_bytes() + size.skeleton  # a run has loaded the vectors by then
    return Situation(size, sizes, ram or budget, process, rates, expected)
