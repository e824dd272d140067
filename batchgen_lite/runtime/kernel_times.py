"""A model's kernels timed before its memory is planned, and what that leaves in the process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from batchgen_lite.models.layers import Skeleton
from batchgen_lite.models.spec import ModelSpec
from batchgen_lite.offload.budget_process import private_bytes
from batchgen_lite.offload.startup_memory import drop_free_heap, drop_library_code
from batchgen_lite.offload.tiles import Module
from batchgen_lite.runtime.activations import ActivationShape
from batchgen_lite.runtime.compute_apart import compute_apart
from batchgen_lite.runtime.compute_probe import measure_compute
from batchgen_lite.runtime.compute_times import ComputeTimes


@dataclass(frozen=True, slots=True)
class TimedKernels:
    """``times``: None where others keep the machine busy. ``kept``: bytes that the kernels have added to the process
    and keep. They belong to what a plan calls transient, which counts them for all shapes that sweeps have; so they are
    never more than it has for them, whatever other threads allocate meanwhile."""

    times: ComputeTimes | None
    kept: int


def time_kernels(
    spec: ModelSpec,
    skeleton: Skeleton,
    modules: Sequence[Module],
    activations: ActivationShape,
    kv_dtype: torch.dtype,
    threads: int,
) -> TimedKernels:
    """See compute_probe.py. Before it the code that only starting up needed is dropped: what is resident afterwards is
    what kernels need."""
    drop_library_code()
    drop_free_heap()
    before = private_bytes()
    times = compute_apart(threads, lambda: measure_compute(spec, skeleton, modules, activations, kv_dtype))
    drop_free_heap()
    return TimedKernels(times, min(max(0, private_bytes() - before), activations.product_bytes))
