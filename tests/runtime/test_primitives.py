"""yield_ and combine: slices park with their hidden states and resume with their rows of one batch."""

from __future__ import annotations

import pytest
import torch

from batchgen_lite.runtime.primitives import ModuleCall, combine, yield_


def call(x: torch.Tensor, kind: str = "qkv", layer: int = 0) -> ModuleCall:
    return ModuleCall(kind, layer, x)


def test_neighbours_in_one_buffer_are_combined_without_a_copy() -> None:
    buffer = torch.randn(16, 6)
    batch = combine([call(buffer[0:3]), call(buffer[3:7]), call(buffer[7:9])], rows=16)
    assert batch.data_ptr() == buffer.data_ptr()
    assert torch.equal(batch, buffer)


def test_others_are_copied_in_order_and_padded_with_zeros() -> None:
    a, b = torch.randn(3, 6), torch.randn(2, 6)
    batch = combine([call(b), call(a)], rows=16)
    assert torch.equal(batch[:5], torch.cat([b, a]))
    assert not batch[5:].any()


def test_a_buffer_that_ends_too_soon_for_the_padding_is_copied() -> None:
    buffer = torch.randn(9, 6)
    batch = combine([call(buffer[0:4]), call(buffer[4:9])], rows=16)
    assert batch.shape == (16, 6)
    assert torch.equal(batch[:9], buffer)


def test_columns_of_a_wider_buffer_are_copied() -> None:
    buffer = torch.randn(16, 8)
    batch = combine([call(buffer[0:4, :6]), call(buffer[4:9, :6])], rows=16)
    assert torch.equal(batch[:9], buffer[:9, :6])


def test_slices_at_different_modules_cannot_be_combined() -> None:
    x = torch.randn(2, 6)
    with pytest.raises(ValueError, match="different modules"):
        combine([call(x), call(x, layer=1)], rows=16)


def test_yield_parks_and_returns_what_it_is_sent() -> None:
    x, result = torch.randn(2, 3), torch.randn(2, 4)
    step = yield_(call(x))
    assert next(step).x is x
    with pytest.raises(StopIteration) as finished:
        step.send(result)
    assert finished.value.value is result
