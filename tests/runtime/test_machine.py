"""What a run takes from the probe, and when it does not."""

from __future__ import annotations

from pathlib import Path

import pytest

from batchgen_lite.offload.probe import DEFAULT_SETTING, DISTURBED
from batchgen_lite.offload.probe_result import ProbeResult, ReaderSetting
from batchgen_lite.runtime import machine
from batchgen_lite.runtime.machine import Machine, compute_threads, look_at_machine
from batchgen_lite.runtime.rates import assumed_rates

FOUND = ReaderSetting("direct", 8, 1 << 20)


def look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, disturbance: float, threads: int | None = None) -> Machine:
    result = ProbeResult(FOUND, 1, 2e9, 5e10, 1 << 28, 2.0, 0.0, "measured", disturbance, flops_alone=8e10)
    monkeypatch.setattr(machine, "probe", lambda paths, cache: result)
    monkeypatch.setattr(machine, "WORTH_PROBING", 1)
    file = tmp_path / "weights"
    file.write_bytes(b"12")
    return look_at_machine([file], threads)


def test_a_clean_probe_chooses_the_reader_and_tells_the_rates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = look(tmp_path, monkeypatch, 0.0)
    assert (found.reader, found.threads) == (FOUND, compute_threads())
    assert found.known is not None
    assert found.known.read_rate == 2e9
    assert found.known.flops == 8e10 * compute_threads()  # measured with one thread, nothing read beside it
    # Beside a byte, half a nanosecond's worth of reading, 3/8 of the cores' work is lost.
    assert found.known.drag == pytest.approx(0.375 / 2e9)


def test_of_a_disturbed_probe_nothing_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = look(tmp_path, monkeypatch, DISTURBED)
    assert (found.reader, found.threads) == (DEFAULT_SETTING, compute_threads())
    assumed = assumed_rates(compute_threads())
    assert found.known is not None  # a job is planned by what machines of this kind reach
    assert (found.known.read_rate, found.known.flops) == (assumed.read_rate, assumed.flops)
    assert "busy" in found.known.source


def test_a_small_model_is_planned_without_rates(tmp_path: Path) -> None:
    file = tmp_path / "weights"
    file.write_bytes(b"12")
    assert look_at_machine([file], None).known is None


def test_the_users_threads_win(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert look(tmp_path, monkeypatch, 0.0, threads=3).threads == 3
    assert look(tmp_path, monkeypatch, DISTURBED, threads=3).threads == 3
