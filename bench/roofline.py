"""How close sweeps come to the machine's limits: reading alone, computing alone, a bare loop of both, and the engine.

    python bench/roofline.py MODEL [--ram 1536MiB] [--rows 256] [--context 100] [--sweeps 6] [--json]

All four in one run, since machines are noisy, on one model, memory plan and batch: ``rows`` sequences that decode one
token each behind ``context`` tokens.

reading     the plan's streamed tiles through its ring, nothing computed
computing   the sweep's arithmetic on weights that stay in memory
bare loop   the same ring, reads, expert FFN and attention with routing fixed beforehand: no scheduler, no sampler,
            no norms, no rotary embedding, no sequences
engine      whole sweeps as users get them, everything between two sweeps included

To see a slow disk, run it under ``bench/limits.py --read-rate 400MB --disk MODEL -- python bench/roofline.py ...``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

import torch
from bare_loop import BareLoop
from rows import FixedRows
from sizes import parse_size

from batchgen_lite.models.load import load_model
from batchgen_lite.offload.pages import pages_for
from batchgen_lite.runtime.build import LocalEngine, build_engine
from batchgen_lite.runtime.options import EngineOptions
from batchgen_lite.runtime.planner import MemoryPlan, Overrides
from batchgen_lite.runtime.stats import RunStatistics, SweepRecord
from batchgen_lite.runtime.work import Work

PREFILL_TOKENS = 512  # prompt tokens that a sweep takes at least, beside the rows that decode already


def timed(action: Callable[[], object], times: int) -> list[float]:
    """Seconds of each of ``times`` calls."""
    seconds = []
    for _ in range(times):
        started = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - started)
    return seconds


def engine_sweeps(
    engine: LocalEngine, rows: int, context: int, sweeps: int, vocab: int
) -> tuple[list[float], MemoryPlan]:
    """Seconds from one sweep's end to the next one's, of the run's steady state: all rows decode, none prefills."""
    ends: list[tuple[float, bool]] = []
    original = RunStatistics.record_sweep

    def record(self: RunStatistics, started: float, ended: float, work: Sequence[Work]) -> SweepRecord:
        sweep = original(self, started, ended, work)
        steady = len(work) == rows and all(item.count == 1 for item in work)
        ends.append((time.perf_counter(), steady))
        return sweep

    # Long enough that the first row is still decoding when the last one's prompt has been computed.
    plan = engine.plan(FixedRows(rows, context, tokens=sweeps, vocab=vocab))
    prefilling = -(-rows * context // max(1, plan.token_budget - rows)) + 1
    source = FixedRows(rows, context, tokens=prefilling + sweeps, vocab=vocab)
    RunStatistics.record_sweep = record  # type: ignore[method-assign]
    try:
        plan = engine.plan(source)
        asyncio.run(engine.run(source))
    finally:
        RunStatistics.record_sweep = original  # type: ignore[method-assign]
    return [after - before for (before, _), (after, steady) in pairwise(ends) if steady], plan


def measure(model: Path, ram: int, threads: int | None, rows: int, context: int, sweeps: int) -> dict[str, float]:
    """Median seconds per sweep of each of the four, and what follows from them."""
    longest = context + sweeps + rows * context // PREFILL_TOKENS + 4
    wish = Overrides(max_sequences=rows, kv_pages=rows * (pages_for(longest) + 1))  # all rows at once
    engine = build_engine(model, EngineOptions(ram=ram, threads=threads, overrides=wish))
    vocab = load_model(model).spec.vocab_size
    whole, plan = engine_sweeps(engine, rows, context, sweeps, vocab)
    engine.close()
    if not whole:
        raise SystemExit(f"{rows} rows of {context} tokens never decoded all at once within {ram} bytes; lower --rows")
    with torch.inference_mode():
        bare = BareLoop(model, plan, rows, context, threads)
        reading = timed(bare.read_only, sweeps)
        both = timed(bare.sweep, sweeps)
        streamed = bare.streamed_bytes
        bare.close()
        resident = BareLoop(model, plan, rows, context, threads, all_resident=True)
        resident.sweep()  # reads everything once
        computing = timed(resident.sweep, sweeps)
        resident.close()
    figures = {
        "reading": statistics.median(reading),
        "computing": statistics.median(computing),
        "bare loop": statistics.median(both),
        "engine": statistics.median(whole),
    }
    bound = max(figures["reading"], figures["computing"])
    return {
        **figures,
        "streamed bytes per sweep": float(streamed),
        "read rate": streamed / figures["reading"] if streamed else 0.0,
        "bare loop / max(reading, computing)": figures["bare loop"] / bound,
        "engine / bare loop": figures["engine"] / figures["bare loop"],
        "engine / max(reading, computing)": figures["engine"] / bound,
        "tokens/s": rows / figures["engine"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Sweeps against the machine's limits.")
    parser.add_argument("model", type=Path)
    parser.add_argument("--ram", default="1536MiB")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--context", type=int, default=100)
    parser.add_argument("--sweeps", type=int, default=6)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    figures = measure(
        arguments.model,
        parse_size(arguments.ram),
        arguments.threads,
        arguments.rows,
        arguments.context,
        arguments.sweeps,
    )
    if arguments.json:
        print(json.dumps(figures))
        return
    for label, value in figures.items():
        unit = " s" if label in ("reading", "computing", "bare loop", "engine") else ""
        print(f"{label:38s} {value:,.3f}{unit}")


if __name__ == "__main__":
    main()
