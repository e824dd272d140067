"""Values over ranges, against a dictionary that has one entry for each point."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from batchgen_lite.offload.devices.intervals import Intervals

POINTS = 40
RANGE = st.tuples(st.integers(0, POINTS), st.integers(0, POINTS)).map(lambda pair: (min(pair), max(pair)))


@given(st.lists(st.tuples(RANGE, st.one_of(st.none(), st.integers(0, 5))), max_size=30), RANGE)
def test_the_last_value_set_for_each_point(
    steps: list[tuple[tuple[int, int], int | None]], asked: tuple[int, int]
) -> None:
    intervals: Intervals[int] = Intervals()
    truth: dict[int, int] = {}
    for (start, stop), value in steps:
        if value is None:
            intervals.clear(start, stop)
        else:
            intervals.set(start, stop, value)
        for point in range(start, stop):
            truth.pop(point, None)
            if value is not None:
                truth[point] = value
    found = {
        point: value
        for start, stop, value in intervals.over(*asked)
        for point in range(max(start, asked[0]), min(stop, asked[1]))
    }
    assert found == {point: value for point, value in truth.items() if asked[0] <= point < asked[1]}
    everything = list(intervals.over(0, POINTS))
    assert all(before[1] <= after[0] for before, after in pairwise(everything))
