from __future__ import annotations

import math

import pytest
import torch

from batchgen_lite.runtime.best_of_row import at_least, best_of_rows, finite_rows, kth_best


@pytest.mark.parametrize("size", [1, 7, 128, 129, 5000, 40_000])
@pytest.mark.parametrize("kind", ["spread", "equal", "ties", "masked"])
def test_the_kth_best_is_what_sorting_says(size: int, kind: str) -> None:
    generator = torch.Generator().manual_seed(size)
    values = torch.randn(size, generator=generator)
    if kind == "equal":
        values.fill_(1.5)
    elif kind == "ties":
        values.mul_(2).round_()
    elif kind == "masked":
        values[torch.randperm(size, generator=generator)[: size // 2]] = -math.inf
    ordered = values.sort(descending=True).values
    for count in {1, 2, 20, 256, size // 2, size - 1, size}:
        if 1 <= count <= size:
            assert kth_best(values, count) == float(ordered[count - 1])


def test_what_is_not_below_a_limit_comes_in_ascending_order() -> None:
    values = torch.tensor([0.5, -1.0, 2.0, 0.5, -math.inf, math.log(0.05)])
    assert at_least(values, 0.5).tolist() == [0, 2, 3]
    assert at_least(values, math.log(0.05)).tolist() == [0, 1, 2, 3, 5]
    assert at_least(values, -math.inf).tolist() == [0, 1, 2, 3, 4, 5]
    assert at_least(values, 3.0).tolist() == []


def test_the_best_is_the_first_of_equals() -> None:
    logits = torch.full((3, 1000), -2.0)
    logits[0, [17, 400]] = 5.0
    logits[1, 999] = 1.0
    assert best_of_rows(logits) == [17, 999, 0]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_row_that_is_not_finite_is_found(bad: float) -> None:
    logits = torch.randn(4, 500)
    logits[2, 321] = bad
    assert finite_rows(logits) == [True, True, False, True]
