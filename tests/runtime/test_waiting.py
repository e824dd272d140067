"""The order of admission."""

from __future__ import annotations

from batchgen_lite.runtime.simulation import SimulatedRow, SimulatedSource
from batchgen_lite.runtime.waiting import WaitingQueue


def test_rows_that_may_generate_most_come_first_and_equals_keep_their_order() -> None:
    rows = [
        SimulatedRow(300, 5, 5),  # long, but done after five sweeps
        SimulatedRow(10, 40, 40),
        SimulatedRow(20, 40, 40),
        SimulatedRow(10, 99, 99),
        SimulatedRow(10, 40, 40),
    ]
    queue = WaitingQueue(SimulatedSource(rows))
    assert [index for index, _ in queue] == [3, 2, 1, 4, 0]
    assert (queue.prompt_tokens, queue.new_tokens) == (350, 224)
    queue.drop(2)
    assert [index for index, _ in queue] == [1, 4, 0]
    assert (queue.prompt_tokens, queue.new_tokens) == (320, 85)
