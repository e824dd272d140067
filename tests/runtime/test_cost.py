"""The arithmetic of a sweep's cost."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from planned_models import COMPUTE_BOUND, DISK_BOUND, MIB, paper_model

from batchgen_lite.kernels.attention import reference as attention
from batchgen_lite.runtime import cost as cost_model
from batchgen_lite.runtime.calibration import Calibration
from batchgen_lite.runtime.cost import PAGE_ROWS, Remaining, SweepCost, SweepLoad, page_visits, remaining_seconds
from batchgen_lite.runtime.rates import MachineRates, ModelWork, sweep_cost


def work() -> ModelWork:
    found = paper_model().work
    assert found is not None
    return found


def test_reading_and_computing_overlap() -> None:
    cost = SweepCost(streamed_bytes=2e9, bytes_per_second=1e9, seconds_per_token=0.01, fixed_seconds=0.5)
    assert cost.seconds(SweepLoad(100)) == pytest.approx(0.5 + 2.0)
    assert cost.seconds(SweepLoad(300)) == pytest.approx(0.5 + 3.0)


def test_every_byte_read_slows_the_cores_and_none_where_all_is_resident() -> None:
    rates = MachineRates(1e9, 1e11, 2, drag=1e-9)
    streaming, resident = sweep_cost(work(), rates, 0), sweep_cost(work(), rates, 0, all_resident=True)
    load = SweepLoad(4000)
    assert streaming.busy(load) - streaming.computing(load) == pytest.approx(streaming.bytes_read(load) * 1e-9)
    assert streaming.seconds(load) == pytest.approx(streaming.busy(load) + streaming.fixed_seconds)
    assert resident.busy(load) == resident.computing(load)
    assert streaming.calibrated(2.0, None).busy(load) == pytest.approx(2 * streaming.busy(load))


def test_few_tokens_touch_few_experts() -> None:
    cost = sweep_cost(work(), DISK_BOUND, 0)
    one, many = cost.bytes_read(SweepLoad(1)), cost.bytes_read(SweepLoad(512))
    assert one == pytest.approx(work().dense_bytes + work().routed_bytes * 8 / 64)
    assert many == pytest.approx(work().dense_bytes + work().routed_bytes, rel=1e-6)


def test_residents_are_read_once() -> None:
    cost = sweep_cost(work(), DISK_BOUND, 1000 * MIB)
    load = SweepLoad(512)
    whole = work().dense_bytes + work().routed_bytes
    assert cost.bytes_read(load, first=True) == pytest.approx(whole, rel=1e-6)
    assert cost.bytes_read(load) == pytest.approx(whole - 1000 * MIB, rel=1e-6)
    assert sweep_cost(work(), DISK_BOUND, 0, all_resident=True).bytes_read(load) == 0


def test_all_weights_cross_the_link_to_an_accelerator() -> None:
    rates = MachineRates(1e12, 1e15, 0, link_rate=10e9)
    cost = sweep_cost(work(), rates, 0, all_resident=True)
    whole = work().dense_bytes + work().routed_bytes
    assert cost.seconds(SweepLoad(1)) == pytest.approx(whole / 10e9 + cost.fixed_seconds)
    assert cost.computing(SweepLoad(1)) < 1e-3  # kernels take weights packed: nothing is widened


@given(st.integers(1, 4096))
def test_slack_is_the_last_number_of_tokens_that_hides(most: int) -> None:
    cost = sweep_cost(work(), DISK_BOUND, 0)
    slack = cost.slack_tokens(most)
    assert 0 <= slack <= most
    if slack:
        assert cost.computing(SweepLoad(slack, slack)) <= cost.reading(SweepLoad(slack, slack))
    if slack < most:
        assert cost.computing(SweepLoad(slack + 1, slack + 1)) > cost.reading(SweepLoad(slack + 1, slack + 1))


def test_visits_count_blocks_of_query_rows_times_pages() -> None:
    assert page_visits(0, 1, 4, 64) == 4 + PAGE_ROWS  # a block of four rows, one page
    assert page_visits(0, 3, 4, 64) == 16 + PAGE_ROWS  # twelve rows in a block of sixteen
    assert page_visits(640, 1, 4, 64) == (4 + PAGE_ROWS) * 11
    assert page_visits(0, 64, 4, 64) == 4 * (64 + PAGE_ROWS)  # four full blocks on the first page


def test_blocks_are_those_of_the_kernel() -> None:
    assert cost_model.BLOCK_ROWS == attention.BLOCK_ROWS


def test_nothing_left_takes_no_time() -> None:
    cost = sweep_cost(work(), DISK_BOUND, 0)
    assert remaining_seconds(cost, Remaining(0, 0, 0, 0), 10, 100) == 0.0


def test_rows_that_run_already_take_their_longest() -> None:
    cost = SweepCost(1e9, 1e9, 0.0)
    assert remaining_seconds(cost, Remaining(8, 0, 80, 10, live=8), 8, 512) == pytest.approx(10.0)
    assert remaining_seconds(cost, Remaining(8, 0, 80, 40, live=8), 8, 512) == pytest.approx(40.0)


@given(st.floats(0.2, 5.0), st.lists(st.integers(1, 2000), min_size=1, max_size=30))
def test_calibration_finds_how_much_slower_the_cores_are(factor: float, tokens: list[int]) -> None:
    base = sweep_cost(work(), COMPUTE_BOUND, 0)
    calibration = Calibration(base)
    for count in tokens:
        load = SweepLoad(count, count)
        seconds = base.fixed_seconds + factor * base.computing(load) + 1.25
        calibration.observe(load, seconds, waited=1.25)
    load = SweepLoad(100, 100)
    assert calibration.compute_factor == pytest.approx(factor)
    assert calibration.cost().computing(load) == pytest.approx(factor * base.computing(load))
    assert calibration.cost(2e9).bytes_per_second == 2e9
    assert calibration.cost(0.0).bytes_per_second == base.bytes_per_second
