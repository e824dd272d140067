"""Which reader, how many threads and which block size suit this disk, and how fast disk and cores are side by side.

Reading and computing share the cores, so everything is measured while both work: a setting that wins on an idle machine
may starve the other side in a sweep. A few settings read a little each, the best two read more, then the winner's
rates are taken over a longer time: a quota gives out its bytes in portions of a tenth of a second. The whole costs a
second or two and at most ``MOST_BYTES``, once per disk and machine: the result is cached (``probe_cache``).

All cores compute meanwhile, as they do in a sweep. Beside a fast disk few products may well come out with one core
less, since a product waits for its slowest thread, but a sweep does not read all the time.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from batchgen_lite.offload.budget import MIB
from batchgen_lite.offload.checkpoint.tensors import Extent
from batchgen_lite.offload.probe_cache import ProbeCache, machine_key
from batchgen_lite.offload.probe_measure import CpuSeconds, Rates, Region, cpu_seconds, measure, measure_alone
from batchgen_lite.offload.probe_result import ProbeResult, ReaderSetting, Trial
from batchgen_lite.offload.readers.kvikio_probe import gds_state

MOST_BYTES = 416 * MIB
LEAST_BYTES = 8 * MIB
"""Below this much checkpoint nothing can be measured, and nothing needs to be."""

DEFAULT_SETTING = ReaderSetting("direct", 4, 4 * MIB)
CANDIDATES = (
    DEFAULT_SETTING,
    ReaderSetting("direct", 2, 8 * MIB),
    ReaderSetting("direct", 8, 1 * MIB),
    ReaderSetting("direct", 8, 4 * MIB),
    ReaderSetting("buffered", 4, 4 * MIB),
)
GDS_CANDIDATES = (ReaderSetting("kvikio", 8, 1 * MIB), ReaderSetting("kvikio", 8, 4 * MIB))

CLEARLY_FASTER = 1.03
"""A setting must be so much faster than the simpler one before it to be preferred: less is noise."""
# Shares of the bytes: all candidates once, the best two again. The winner gets what is left.
_FIRST, _SECOND = 0.25, 0.2

DISTURBED = 0.25
"""From this share of the cores' time spent on other processes, a result is used but not cached."""

Measure = Callable[[Sequence[Path], ReaderSetting, int, Sequence[Extent]], Rates]
MeasureAlone = Callable[[int], float]


def probe(
    paths: Sequence[Path],
    *,
    cache: ProbeCache | None = None,
    refresh: bool = False,
    most_bytes: int = MOST_BYTES,
    measure: Measure = measure,
    measure_alone: MeasureAlone = measure_alone,
    cores: int | None = None,
    cpu_seconds: Callable[[], CpuSeconds] = cpu_seconds,
) -> ProbeResult:
    """Measure, or take from ``cache`` (None: neither read nor written) unless ``refresh``.

    ``paths``: the checkpoint's files; regions spread over them are read. ``cores``: by default those this process may
    use. Raises StorageError if a file cannot be read.
    """
    cores = cores or usable_cores()
    if sum(path.stat().st_size for path in paths) < LEAST_BYTES:
        return ProbeResult(DEFAULT_SETTING, cores, 0.0, 0.0, 0, 0.0, time.time(), "default")
    key = machine_key(paths[0], cores)
    if cache is not None and not refresh:
        found = cache.load(key)
        if found is not None:
            return found
    before = cpu_seconds()
    result = _measure_all(paths, most_bytes, measure, cores)
    result = replace(result, flops_alone=measure_alone(result.compute_threads))
    result = replace(result, disturbance=cpu_seconds().disturbance_since(before))
    if cache is not None and result.disturbance < DISTURBED:
        cache.store(key, result)
    return result


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0))


def _measure_all(paths: Sequence[Path], most_bytes: int, measure: Measure, cores: int) -> ProbeResult:
    began = time.perf_counter()
    candidates = CANDIDATES + (GDS_CANDIDATES if gds_state(paths[0])[0] else ())
    region = Region(paths)
    trials: list[Trial] = []
    used = 0

    def run(setting: ReaderSetting, nbytes: int) -> Trial:
        nonlocal used
        rates = measure(paths, setting, cores, region.next(nbytes))
        used += rates.bytes_read
        trial = Trial(setting, cores, rates.read_rate, rates.flops)
        trials.append(trial)
        return trial

    first = [run(setting, int(most_bytes * _FIRST) // len(candidates)) for setting in candidates]
    finalists = sorted(first, key=_merit, reverse=True)[:2]
    # In the candidates' order, so that the simpler one wins a near tie.
    again = [
        run(setting, int(most_bytes * _SECOND) // 2)
        for setting in candidates
        if any(trial.setting == setting for trial in finalists)
    ]
    setting = _prefer_earlier(again).setting
    best = run(setting, most_bytes - used)
    return ProbeResult(
        setting=setting,
        compute_threads=cores,
        read_rate=best.read_rate,
        flops=best.flops,
        bytes_read=used,
        seconds=time.perf_counter() - began,
        taken_at=time.time(),
        source="measured",
        trials=tuple(trials),
    )


def _prefer_earlier(trials: Sequence[Trial]) -> Trial:
    best = trials[0]
    for trial in trials[1:]:
        if _merit(trial) > _merit(best) * CLEARLY_FASTER:
            best = trial
    return best


def _merit(trial: Trial) -> float:
    """A setting that reads a little faster but takes the cores' time for it, as copying out of the page cache does, is
    no gain: both rates count alike."""
    return trial.read_rate * trial.flops
