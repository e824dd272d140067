"""``plan``: the model, the machine and the budget as a run would find them. Imports torch."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from batchgen_lite.errors import StorageError
from batchgen_lite.models.layers import load_skeleton
from batchgen_lite.models.load import LoadedModel, load_model
from batchgen_lite.models.modules import modules_of
from batchgen_lite.offload.budget import available_memory, default_ram_budget
from batchgen_lite.offload.budget_process import resident_bytes
from batchgen_lite.offload.devices.select import open_device
from batchgen_lite.offload.kv import kv_dtype_of
from batchgen_lite.offload.spill import spill_staging
from batchgen_lite.offload.spill_file import SpillOptions
from batchgen_lite.runtime.hardware import HardwareProfile
from batchgen_lite.runtime.interface import RequestSize
from batchgen_lite.runtime.job_plan import Situation, SpillRoom
from batchgen_lite.runtime.kernel_times import TimedKernels, time_kernels
from batchgen_lite.runtime.machine import look_at_machine
from batchgen_lite.runtime.migration import Tier, TierState
from batchgen_lite.runtime.model_size import described_size
from batchgen_lite.runtime.options import EngineOptions
from batchgen_lite.runtime.planner import ModelSize
from batchgen_lite.runtime.runner import LINK_RATE


def describe_situation(
    path: Path,
    sizes: Sequence[RequestSize],
    options: EngineOptions,
    profile: HardwareProfile | None,
    expected: float | None,
) -> Situation:
    """``options`` as a run would be given them; budgets that they leave open are what this machine, or the profile's,
    can spare. A device's link is taken to be as fast as a run takes it to be until it has shown its own. ModelError,
    StorageError, UsageError for a device that cannot be used."""
    _import_a_run()
    model = load_model(path)
    vram, kept = None, 0
    if profile is not None:
        rates, budget = profile.rates, profile.available
        size = described_size(model, kv_dtype=options.kv_dtype, threads=rates.threads)
    else:
        rates = look_at_machine([file.path for file in model.checkpoint.files], options.threads).rates
        device = open_device(options.device, options.vram)
        vram = device.memory().capacity if device.separate else None
        device.close()
        size = described_size(model, kv_dtype=options.kv_dtype, threads=rates.threads if vram is None else 1)
        if vram is None and rates.known:
            kernels = _time_kernels(model, size, options.kv_dtype, rates.threads)
            rates, kept = replace(rates, times=kernels.times), kernels.kept
        budget = default_ram_budget(available_memory(), resident_bytes())
    if vram is not None and not rates.link_rate:
        rates = replace(rates, link_rate=LINK_RATE)
    process = process_of_a_run() - kept + size.skeleton
    spill = None
    if options.spill is not None:
        spill = _spill_room(options.spill, size.page, rates.read_rate)
        process += spill_staging(size.page)
    return Situation(size, sizes, options.ram or budget, process, rates, expected, vram, spill)


def _spill_room(options: SpillOptions, page_bytes: int, rate: float) -> SpillRoom:
    """What a run would be granted. Its disk is taken to write and read at ``rate`` bytes/s, as a run does until it
    knows better. StorageError where the directory cannot be one."""
    wanted = options.directory.absolute()
    existing = next(path for path in (wanted, *wanted.parents) if path.exists())
    if not existing.is_dir():
        raise StorageError(f"--spill-dir {options.directory}: {existing} is no directory; give one, or a new name")
    space = os.statvfs(existing)
    nbytes = options.disk if options.disk is not None else space.f_bavail * space.f_frsize // 2
    slot = spill_staging(page_bytes)
    return SpillRoom(str(options.directory), nbytes, TierState(Tier.DISK, nbytes // slot, 2 * slot / rate))


def _time_kernels(model: LoadedModel, size: ModelSize, kv_dtype: str, threads: int) -> TimedKernels:
    """As the run would."""
    skeleton, modules = load_skeleton(model), modules_of(model.spec, model.weights)
    dtype = kv_dtype_of(kv_dtype, model.spec.dtype)
    return time_kernels(model.spec, skeleton, modules, size.activations, dtype, threads)


OPEN_MODEL = 6 << 20
"""Bytes that the reader's threads, the vectors' reading and the event loop add to a run's process; 4 MiB measured."""


def process_of_a_run() -> int:
    """Resident bytes of a process that has imported what a run imports and opened its model, by the time it plans its
    memory. Otherwise the smallest budget that ``plan`` names would be some MiB short of what ``generate`` takes."""
    return resident_bytes() + OPEN_MODEL


def _import_a_run() -> None:
    """First of all, as in a run: what importing leaves is counted, and what it does not need again is given back."""
    import batchgen_lite.cli.run_job
    import batchgen_lite.runtime.build  # noqa: F401
