"""The probe chooses by what it measures (faked here), keeps to its bounds (real), and remembers what it found."""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
import pytest
import torch
from reading import cached_pages, write_file

from batchgen_lite.errors import StorageError
from batchgen_lite.offload import probe_cache
from batchgen_lite.offload.budget import MIB
from batchgen_lite.offload.checkpoint.tensors import Extent
from batchgen_lite.offload.probe import CANDIDATES, DEFAULT_SETTING, LEAST_BYTES, probe, usable_cores
from batchgen_lite.offload.probe_cache import ProbeCache, filesystem_of, machine_key
from batchgen_lite.offload.probe_measure import CpuSeconds, Rates, Region, cpu_seconds, forget, measure, sustained_rate
from batchgen_lite.offload.probe_result import ProbeResult, ReaderSetting

BUFFERED = ReaderSetting("buffered", 4, 4 * MIB)
EIGHT = ReaderSetting("direct", 8, 1 * MIB)


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("checkpoint")
    for number in range(2):
        write_file(folder / f"{number}.bin", 12 * MIB + 17, number)
    return sorted(folder.iterdir())


@pytest.fixture
def large(tmp_path: Path) -> Path:
    """A file that looks large enough to measure; it is never read."""
    path = tmp_path / "large.bin"
    with path.open("wb") as file:
        file.truncate(1 << 30)
    return path


Rate = Callable[[ReaderSetting, int], tuple[float, float]]


class FakeMachine:
    """Measures nothing: gives the rates it is told and notes what it was asked."""

    def __init__(self, rate: Rate) -> None:
        self.rate = rate
        self.calls: list[tuple[ReaderSetting, int, list[Extent]]] = []

    def __call__(
        self, paths: Sequence[Path], setting: ReaderSetting, compute_threads: int, window: Sequence[Extent]
    ) -> Rates:
        self.calls.append((setting, compute_threads, list(window)))
        read_rate, flops = self.rate(setting, compute_threads)
        return Rates(read_rate, flops, sum(extent.nbytes for extent in window))


def quiet() -> CpuSeconds:
    return CpuSeconds(0.0, 0.0, 0.0)


def choose(path: Path, rate: Rate, cores: int = 4) -> ProbeResult:
    return probe([path], measure=FakeMachine(rate), measure_alone=alone, cores=cores, cpu_seconds=quiet)


def alone(threads: int) -> float:
    return threads * 2e10


def test_the_fastest_setting_wins(large: Path) -> None:
    result = choose(large, lambda setting, threads: (2e9 if setting == EIGHT else 1e9, 1e11))
    assert result.setting == EIGHT
    assert result.read_rate == 2e9
    assert result.source == "measured"


def test_a_disk_that_is_faster_through_the_page_cache_is_read_so(large: Path) -> None:
    assert choose(large, lambda s, t: (3e9 if s.kind == "buffered" else 1e9, 1e11)).setting == BUFFERED


def test_reading_faster_at_the_cores_cost_is_no_gain(large: Path) -> None:
    assert choose(large, lambda s, t: (1.2e9, 5e10) if s.kind == "buffered" else (1e9, 1e11)).setting == DEFAULT_SETTING


def test_a_hair_faster_is_noise_and_the_simpler_setting_stays(large: Path) -> None:
    assert choose(large, lambda s, t: (1.02e9 if s == EIGHT else 1e9, 1e11)).setting == DEFAULT_SETTING


def test_rates_are_those_of_all_cores_over_the_longest_window(large: Path) -> None:
    machine = FakeMachine(lambda setting, threads: (1e9, threads * 1e10))
    result = probe([large], measure=machine, measure_alone=alone, cores=4, most_bytes=256 * MIB, cpu_seconds=quiet)
    assert (result.compute_threads, result.flops, result.flops_alone) == (4, 4e10, 8e10)
    assert {threads for _, threads, _ in machine.calls} == {4}
    setting, _, window = machine.calls[-1]
    assert setting == result.setting
    assert len(window) > max(len(other) for _, _, other in machine.calls[:-1])


def test_one_core_is_possible(large: Path) -> None:
    assert choose(large, lambda s, t: (1e9, 1e9), cores=1).compute_threads == 1


def test_everything_is_measured_within_the_bytes_and_on_fresh_ones(large: Path) -> None:
    machine = FakeMachine(lambda s, t: (1e9, 1e11))
    result = probe([large], measure=machine, measure_alone=alone, cores=2, most_bytes=256 * MIB, cpu_seconds=quiet)
    assert {setting for setting, _, _ in machine.calls} >= set(CANDIDATES)
    windows = [(extent.file, extent.offset) for _, _, window in machine.calls for extent in window]
    assert len(windows) == len(set(windows)), "a trial found bytes that an earlier one had read"
    assert result.bytes_read == sum(e.nbytes for _, _, window in machine.calls for e in window) <= 256 * MIB
    assert len(result.trials) == len(machine.calls)


def test_a_small_checkpoint_is_not_worth_measuring(tmp_path: Path) -> None:
    path = tmp_path / "small.bin"
    path.write_bytes(b"x" * (LEAST_BYTES - 1))
    machine = FakeMachine(lambda s, t: (1e9, 1e9))
    result = probe([path], measure=machine, measure_alone=alone, cores=3)
    assert (result.source, result.setting, result.compute_threads) == ("default", DEFAULT_SETTING, 3)
    assert machine.calls == []


# ---- for real ----


def test_the_page_cache_is_not_taken_for_the_disk(tmp_path: Path) -> None:
    path = tmp_path / "fetched.bin"
    write_file(path, 12 * MIB, on_disk=True)
    path.read_bytes()
    before = cached_pages(path)
    forget([path], [Extent(0, 0, 8 * MIB)])
    assert before - cached_pages(path) == 8 * MIB // mmap.PAGESIZE


def test_a_real_probe_reads_and_computes_within_its_bounds(shards: list[Path], tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    result = probe(shards, most_bytes=100 * MIB, cache=ProbeCache(tmp_path))
    assert torch.get_num_threads() == threads
    assert 0 < result.bytes_read <= 100 * MIB
    assert result.read_rate > 0
    assert result.setting in CANDIDATES
    assert 1 <= result.compute_threads <= usable_cores()
    assert result.flops > 0
    assert result.flops_alone > 0
    assert 0 <= result.disturbance <= 1


def test_a_first_burst_is_not_the_rate() -> None:
    """Twelve times 8 MB: five at once out of a quota's credit, then one every 40 ms."""
    burst = [(10.0 + 0.001 * i, 8_000_000) for i in range(1, 6)]
    steady = [(10.005 + 0.04 * i, 8_000_000) for i in range(1, 8)]
    assert sustained_rate(10.0, burst + steady) == pytest.approx(2e8)
    assert sustained_rate(10.0, burst) == pytest.approx(8e9)  # too few to leave any out


def test_a_real_measurement_counts_what_it_read(shards: list[Path]) -> None:
    window = Region(shards).next(16 * MIB)
    rates = measure(shards, EIGHT, 1, window)
    assert rates.bytes_read == sum(extent.nbytes for extent in window)
    assert rates.read_rate > 0


def test_a_file_that_cannot_be_read_ends_the_probe(shards: list[Path]) -> None:
    beyond = [Extent(0, shards[0].stat().st_size - 10, 4096)]
    with pytest.raises(StorageError, match="ends at offset"):
        measure(shards, EIGHT, 1, beyond)


def test_windows_go_round_in_small_checkpoints(shards: list[Path]) -> None:
    region = Region(shards)
    assert [(e.file, e.offset) for e in region.next(40 * MIB)] == [
        (0, 0), (0, 8 * MIB), (1, 0), (1, 8 * MIB), (0, 0),
    ]  # fmt: skip
    assert len(region.next(1)) == 1


def test_time_of_other_processes_is_told_apart() -> None:
    before, after = CpuSeconds(idle=10, total=100, own=5), CpuSeconds(idle=12, total=110, own=9)
    assert after.disturbance_since(before) == pytest.approx(0.4)
    assert before.disturbance_since(before) == 0
    now = cpu_seconds()
    assert 0 < now.idle < now.total
    assert now.own > 0


# ---- the cache ----


def test_a_second_probe_measures_nothing(large: Path, tmp_path: Path) -> None:
    machine = FakeMachine(lambda s, t: (2e9 if s == EIGHT else 1e9, 1e11))
    cache = ProbeCache(tmp_path / "new" / "folder")
    first = probe([large], measure=machine, measure_alone=alone, cores=4, cache=cache, cpu_seconds=quiet)
    calls = len(machine.calls)
    second = probe([large], measure=machine, measure_alone=alone, cores=4, cache=cache, cpu_seconds=quiet)
    assert len(machine.calls) == calls
    assert second.source == "cached"
    assert (second.setting, second.compute_threads, second.trials) == (EIGHT, 4, first.trials)
    assert (
        probe([large], measure=machine, measure_alone=alone, cores=2, cache=cache, cpu_seconds=quiet).source
        == "measured"
    )
    assert (
        probe(
            [large], measure=machine, measure_alone=alone, cores=4, cache=cache, refresh=True, cpu_seconds=quiet
        ).source
        == "measured"
    )


def test_a_disturbed_measurement_is_used_but_not_kept(large: Path, tmp_path: Path) -> None:
    readings = iter([CpuSeconds(0, 0, 0), CpuSeconds(2, 10, 4), CpuSeconds(0, 0, 0), CpuSeconds(2, 10, 7)])
    machine, cache = FakeMachine(lambda s, t: (1e9, 1e11)), ProbeCache(tmp_path)
    first = probe(
        [large], measure=machine, measure_alone=alone, cores=4, cache=cache, cpu_seconds=lambda: next(readings)
    )
    assert (first.source, first.disturbance) == ("measured", 0.4)
    second = probe(
        [large], measure=machine, measure_alone=alone, cores=4, cache=cache, cpu_seconds=lambda: next(readings)
    )
    assert second.source == "measured"
    assert (
        probe([large], measure=machine, measure_alone=alone, cores=4, cache=cache, cpu_seconds=quiet).source == "cached"
    )


def result_at(taken_at: float) -> ProbeResult:
    return ProbeResult(EIGHT, 2, 1e9, 1e11, 5, 1.0, taken_at, "measured")


@pytest.mark.parametrize(("age", "kept"), [(0, True), (29 * 86_400, True), (31 * 86_400, False), (-60, False)])
def test_old_entries_and_those_from_the_future_are_forgotten(tmp_path: Path, age: float, kept: bool) -> None:
    cache = ProbeCache(tmp_path, now=lambda: 1e9)
    assert cache.store("k", result_at(1e9 - age))
    assert (cache.load("k") is not None) == kept


@pytest.mark.parametrize(
    "damage", ["", "{", "[]", "null", '{"setting": 5}', '{"trials": [], "setting": {"kind": "x"}}']
)
def test_a_damaged_entry_is_no_entry(tmp_path: Path, damage: str) -> None:
    cache = ProbeCache(tmp_path, now=lambda: 1e9)
    (tmp_path / "probe-k.json").write_text(damage)
    assert cache.load("k") is None
    assert cache.store("k", result_at(1e9))
    assert cache.load("k") is not None
    entry = json.loads((tmp_path / "probe-k.json").read_text())
    entry["setting"]["threads"] = 0
    (tmp_path / "probe-k.json").write_text(json.dumps(entry))
    assert cache.load("k") is None


def test_a_cache_that_cannot_be_written_is_done_without(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert not ProbeCache(blocked / "folder").store("k", result_at(0))
    cache = ProbeCache(tmp_path / "full")
    (tmp_path / "full" / "probe-k.json").mkdir(parents=True)  # os.replace then fails
    assert not cache.store("k", result_at(0))
    assert os.listdir(tmp_path / "full") == ["probe-k.json"], "no temporary file stays"


def test_the_key_names_file_system_and_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "shard.bin"
    path.write_bytes(b"")
    assert machine_key(path, 2) == machine_key(tmp_path, 2) != machine_key(path, 3)
    assert filesystem_of(path)[2] == max(
        (p.mountpoint for p in psutil.disk_partitions(all=True) if path.resolve().is_relative_to(p.mountpoint)), key=len
    )
    before = machine_key(path, 2)
    monkeypatch.setattr(probe_cache, "filesystem_of", lambda path: ("server:/share", "nfs4", "/mnt"))
    assert machine_key(path, 2) != before


def test_the_cache_lies_where_users_expect_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert probe_cache.cache_directory() == tmp_path / "batchgen-lite"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert probe_cache.cache_directory() == tmp_path / "home" / ".cache" / "batchgen-lite"
