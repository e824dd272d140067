"""The machine as a run finds it: which reader, how many threads, how fast. Measured once a disk, then cached."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from batchgen_lite.offload.probe import DEFAULT_SETTING, DISTURBED, probe
from batchgen_lite.offload.probe_cache import ProbeCache
from batchgen_lite.offload.probe_result import ProbeResult, ReaderSetting
from batchgen_lite.runtime.compute_apart import compute_apart
from batchgen_lite.runtime.rates import MachineRates, assumed_rates

WORTH_PROBING = 256 << 20
"""Bytes. A smaller model fits anywhere and is read in a moment: measuring would take longer than it could save."""

DISTURBED_SOURCE = "assumed, others kept the machine busy"


@dataclass(frozen=True, slots=True)
class Machine:
    """``rates`` are assumed, not measured, for a model that is not worth a probe, where they decide nothing, and where
    the probe was disturbed, where they are better than none."""

    reader: ReaderSetting
    threads: int
    rates: MachineRates

    @property
    def known(self) -> MachineRates | None:
        """The rates if they are to decide how memory is divided."""
        return self.rates.known


def look_at_machine(paths: Sequence[Path], threads: int | None, *, cache: ProbeCache | None = None) -> Machine:
    """Probe the disk that ``paths`` lie on, or take the rates from ``cache`` (by default the user's). ``threads`` given
    by the user win over one a core. Of a probe that others disturbed nothing is used. StorageError if a file cannot be
    read."""
    count = threads or compute_threads()
    if sum(path.stat().st_size for path in paths) < WORTH_PROBING:
        return Machine(DEFAULT_SETTING, count, assumed_rates(count))
    result = compute_apart(count, lambda: probe(paths, cache=cache or ProbeCache()))
    if result.disturbance >= DISTURBED:  # the figures tell of the neighbours, who may be gone in a minute
        return Machine(DEFAULT_SETTING, count, replace(assumed_rates(count), source=DISTURBED_SOURCE))
    # As many as the probe computed with, or one a physical core where it counted hyper-threads (see rates_of).
    return Machine(result.setting, count, rates_of(result, count))


def rates_of(result: ProbeResult, threads: int) -> MachineRates:
    """What a probe measured, for another number of threads in proportion. The drag: a byte takes 1 / read rate seconds,
    for which the cores work at ``flops`` instead of ``flops_alone``."""
    if result.read_rate <= 0 or result.flops <= 0 or result.flops_alone <= 0:
        return assumed_rates(threads)
    lost = max(0.0, 1.0 - result.flops / result.flops_alone)
    return MachineRates(
        result.read_rate,
        result.flops_alone * threads / result.compute_threads,
        threads,
        source=result.source,
        drag=lost / result.read_rate,
    )


def compute_threads() -> int:
    """One a physical core that this process may run on; hyper-threads do not help dense arithmetic."""
    allowed = len(psutil.Process().cpu_affinity() or [0])
    return max(1, min(allowed, psutil.cpu_count(logical=False) or allowed))
