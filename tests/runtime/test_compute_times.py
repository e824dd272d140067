"""Curves of seconds by rows, and what a sweep costs by them."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from planned_models import COMPUTE_BOUND, paper_model

from batchgen_lite.kernels.padding import ROW_PADDING
from batchgen_lite.runtime.compute_times import BEYOND, NOTHING, ComputeTimes, Curve
from batchgen_lite.runtime.cost import SweepLoad
from batchgen_lite.runtime.rates import MachineRates, expected_times, sweep_cost

BENT = Curve(((16.0, 1.0), (32.0, 1.5), (64.0, 3.5)))


@pytest.mark.parametrize(
    ("rows", "seconds"), [(1, 1.0), (16, 1.0), (24, 1.25), (32, 1.5), (48, 2.5), (64, 3.5), (128, 7.5)]
)
def test_a_curve_passes_through_its_points_and_goes_on_as_its_last_piece(rows: float, seconds: float) -> None:
    assert BENT.at(rows) == pytest.approx(seconds)
    assert BENT.scaled(3.0).at(rows) == pytest.approx(3 * seconds)


def test_a_curve_of_one_point_is_constant() -> None:
    assert Curve(((16.0, 2.0),)).at(1) == Curve(((16.0, 2.0),)).at(1000) == 2.0
    assert NOTHING.at(1000) == 0.0


@given(st.lists(st.floats(0.0, 10.0), min_size=2, max_size=6), st.lists(st.floats(0.0, 500.0), min_size=2, max_size=9))
def test_more_rows_never_take_less_time_whatever_was_measured(seconds: list[float], rows: list[float]) -> None:
    curve = Curve.through((16.0 * (number + 1), value) for number, value in enumerate(seconds))
    found = [curve.at(row) for row in sorted(rows)]
    assert all(after >= before * (1 - 1e-9) for before, after in pairwise(found))
    assert found[0] >= 0.0


def test_a_disturbed_measurement_gives_way_to_its_neighbours() -> None:
    clean = Curve.through([(16, 1.0), (32, 1.5), (64, 2.5), (128, 4.5)])
    assert clean.points == ((16, 1.0), (32, 1.5), (64, 2.5), (128, 4.5))
    low = Curve.through([(16, 9.0), (32, 1.5), (64, 2.5), (128, 4.5)])
    assert low.points == ((16, 1.5), (32, 1.5), (64, 2.5), (128, 4.5))
    high = Curve.through([(16, 1.0), (32, 1.5), (64, 2.5), (128, 50.0)])
    assert high.at(128) == pytest.approx(2 * 2.5 * BEYOND)


def test_a_line_counts_whole_blocks_of_rows() -> None:
    line = Curve.line(1.0, 0.5)
    assert line.at(1) == line.at(ROW_PADDING) == pytest.approx(1.0 + 0.5 * ROW_PADDING)
    assert line.at(10 * ROW_PADDING) == pytest.approx(1.0 + 5.0 * ROW_PADDING)


def test_measured_times_take_the_place_of_rates() -> None:
    work = paper_model().work
    assert work is not None
    times = ComputeTimes(Curve(((16.0, 0.3), (32.0, 0.4))), BENT.scaled(0.01), Curve(((16.0, 0.2), (32.0, 0.2))), 1e-6)
    measured = sweep_cost(work, replace(COMPUTE_BOUND, times=times), 0)
    load = SweepLoad(8, 4, 1000)
    touched = 1 - (1 - 8 / 64) ** 8
    assert measured.computing(load) == pytest.approx(0.3 + 64 * touched * 0.01 + 0.2 + 1000 * 1e-6)
    assert measured.computing(SweepLoad(8, 0, 1000)) == pytest.approx(measured.computing(load) - 0.2)
    many = SweepLoad(1024)  # every expert has 128 rows, and half a block of padding
    assert measured.computing(many) == pytest.approx(times.dense.at(1024) + 64 * 0.01 * BENT.at(136))


def test_cores_twice_as_fast_take_half_as_long() -> None:
    work = paper_model().work
    assert work is not None
    load = SweepLoad(300, 100, 5000)
    times = ComputeTimes(BENT, BENT, BENT, 1e-4)
    for rates in (COMPUTE_BOUND, replace(COMPUTE_BOUND, times=times)):
        slow, fast = sweep_cost(work, rates, 0), sweep_cost(work, rates.with_cores(2.0), 0)
        assert fast.computing(load) == pytest.approx(slow.computing(load) / 2)


def test_an_accelerator_widens_nothing() -> None:
    work = paper_model().work
    assert work is not None
    times = expected_times(work, MachineRates(1e9, 1e12, 0, link_rate=1e10))
    assert times.expert.at(ROW_PADDING) == pytest.approx(work.expert_flops * ROW_PADDING / 1e12)
