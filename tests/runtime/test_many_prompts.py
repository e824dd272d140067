"""20,000 short prompts: no step of scheduling depends on how many there are, and memory stays as it is."""

from __future__ import annotations

import asyncio
from pathlib import Path

from call_counts import calls_of
from tiny_models import tiny_checkpoint

from batchgen_lite.offload.budget_process import resident_bytes
from batchgen_lite.runtime.build import build_engine
from batchgen_lite.runtime.clock import VirtualClock
from batchgen_lite.runtime.cost import SweepCost
from batchgen_lite.runtime.engine import Run
from batchgen_lite.runtime.interface import Finish, RequestSize, SampledToken, SequenceRequest
from batchgen_lite.runtime.options import EngineOptions
from batchgen_lite.runtime.planner import Overrides
from batchgen_lite.runtime.scheduler import Limits
from batchgen_lite.runtime.simulation import SimulatedRow, SimulatedRunner, SimulatedSource
from batchgen_lite.sampling_params import SamplingParams

MIB = 1 << 20
COST = SweepCost(streamed_bytes=1e9, bytes_per_second=1e9, seconds_per_token=0.001)


def calls_per_row(rows: int) -> float:
    """Calls, of Python and of C, that a run takes for each row: what time would tell on a quiet machine."""
    source = SimulatedSource([SimulatedRow(5, 2, 4)] * rows)
    run = Run(source, SimulatedRunner(Limits(512, 128, 400), COST, VirtualClock()), VirtualClock())
    calls = calls_of(run)
    assert len(source.finished) == rows
    return calls / rows


def test_a_row_costs_the_same_among_twenty_thousand() -> None:
    few, many = calls_per_row(1000), calls_per_row(20_000)
    assert many < 1.05 * few


class ShortRows:
    """Prompts of a few tokens made up on the way; nothing is kept but the process's size every 1,000 records."""

    def __init__(self, rows: int) -> None:
        self.rows, self.done_rows = rows, 0
        self.sizes: list[int] = []
        self.params = SamplingParams(temperature=0.0, max_tokens=2)

    def __len__(self) -> int:
        return self.rows

    def size(self, index: int) -> RequestSize:
        return RequestSize(1 + index % 5, 2)

    def open(self, index: int) -> tuple[SequenceRequest, ShortRows]:
        ids = [3 + (index + i) % 200 for i in range(1 + index % 5)]
        return SequenceRequest(index, ids, self.params, seed=7), self

    def accept(self, token: SampledToken) -> Finish | None:
        return None

    def done(self, finish: Finish) -> None:
        self.done_rows += 1
        if self.done_rows % 1000 == 0:
            self.sizes.append(resident_bytes())

    def failed(self, *_: object) -> None:
        raise AssertionError("a row failed")


def test_memory_stays_flat_over_twenty_thousand_prompts(tmp_path: Path) -> None:
    tiny_checkpoint("llama", tmp_path, num_hidden_layers=1)
    overrides = Overrides(token_budget=1024, max_sequences=512, kv_pages=600)
    engine = build_engine(tmp_path, EngineOptions(threads=1, overrides=overrides))
    try:
        source = ShortRows(20_000)
        summary = asyncio.run(engine.run(source))
    finally:
        engine.close()
    assert source.done_rows == 20_000
    assert summary.tokens_decoded == 40_000
    early, late = max(source.sizes[2:5]), max(source.sizes[-5:])
    assert late - early < 4 * MIB, [size // MIB for size in source.sizes]
