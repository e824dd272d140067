"""How close sweeps come to the machine's limits: reading alone, computing alone, a bare loop of both, and the engine.

    python bench/roofline.py MODEL... [--ram 1536MiB] [--rows 256...] [--context 100] [--sweeps 6] [--json]

All four in one run, since machines are noisy, on one model, memory plan and batch: ``rows`` sequences that decode one
token each behind ``context`` tokens. Several models or batches end in a table: how cost grows with the work.

reading     the plan's streamed tiles through its ring, nothing computed
computing   the sweep's arithmetic on weights that all stay in memory; not with --streaming, under a limit of memory
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
from batchgen_lite.runtime.build import build_engine
from batchgen_lite.runtime.compute_apart import compute_apart
from batchgen_lite.runtime.machine import compute_threads
from batchgen_lite.runtime.options import EngineOptions
from batchgen_lite.runtime.planner import MemoryPlan, Overrides
from batchgen_lite.trace.recorder import Recorder

COLUMNS = (
    "model",
    "rows",
    "streamed",
    "reading",
    "computing",
    "bare loop",
    "engine",
    "of the bare loop",
    "of the limit",
    "tokens/s",
)
PREFILL_TOKENS = 512  # prompt tokens that a sweep takes at least, beside the rows that decode already


def timed(action: Callable[[], object], times: int) -> list[float]:
    """Seconds of each of ``times`` calls."""
    seconds = []
    for _ in range(times):
        started = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - started)
    return seconds


class SweepEnds(Recorder):
    """Notes when each sweep ended, and whether all of ``rows`` decoded in it and none prefilled."""

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._ends: list[tuple[float, bool]] = []

    def sweep_ends(self, since: float, prefilled: int, decoded: int, sequences: int) -> None:
        """See Recorder.sweep_ends."""
        self._ends.append((time.perf_counter(), sequences == self._rows and decoded == self._rows and not prefilled))

    def steady(self) -> list[float]:
        """Seconds from one sweep's end to the next one's, of sweeps in the steady state."""
        return [after - before for (before, _), (after, steady) in pairwise(self._ends) if steady]


def engine_sweeps(
    model: Path, options: EngineOptions, rows: int, context: int, sweeps: int, vocab: int
) -> tuple[list[float], MemoryPlan]:
    """Seconds from one sweep's end to the next one's while all rows decode, and the plan that they ran under."""
    ends = SweepEnds(rows)
    engine = build_engine(model, options, recorder=ends)
    # Long enough that the first row is still decoding when the last one's prompt has been computed.
    plan = engine.plan(FixedRows(rows, context, tokens=sweeps, vocab=vocab))
    prefilling = -(-rows * context // max(1, plan.token_budget - rows)) + 1
    source = FixedRows(rows, context, tokens=prefilling + sweeps, vocab=vocab)
    plan = engine.plan(source)
    asyncio.run(engine.run(source))
    engine.close()
    return ends.steady(), plan


def measure(
    model: Path, ram: int, threads: int | None, rows: int, context: int, sweeps: int, *, streaming: bool = False
) -> dict[str, float]:
    """Median seconds per sweep of each of the four, and what follows from them. ``streaming``: without computing alone,
    for which all weights are held in memory."""
    longest = context + sweeps + rows * context // PREFILL_TOKENS + 4
    wish = Overrides(max_sequences=rows, kv_pages=rows * (pages_for(longest) + 1))  # all rows at once
    vocab = load_model(model).spec.vocab_size
    options = EngineOptions(ram=ram, threads=threads, overrides=wish)
    whole, plan = engine_sweeps(model, options, rows, context, sweeps, vocab)
    if not whole:
        raise SystemExit(f"{rows} rows of {context} tokens never decoded all at once within {ram} bytes; lower --rows")

    def without_engine() -> tuple[dict[str, list[float]], int]:
        with torch.inference_mode():
            bare = BareLoop(model, plan, rows, context, threads)
            seconds = {"reading": timed(bare.read_only, sweeps), "bare loop": timed(bare.sweep, sweeps)}
            streamed = bare.streamed_bytes
            bare.close()
            if not streaming:
                resident = BareLoop(model, plan, rows, context, threads, all_resident=True)
                resident.sweep()  # reads everything once
                seconds["computing"] = timed(resident.sweep, sweeps)
                resident.close()
        return seconds, streamed

    # On a thread that ends: its team of workers would make the next engine's sleep between any two operations.
    seconds, streamed = compute_apart(threads or compute_threads(), without_engine)
    seconds["engine"] = whole
    figures = {name: statistics.median(values) for name, values in seconds.items()}
    figures |= {
        "streamed bytes per sweep": float(streamed),
        "read rate": streamed / figures["reading"] if streamed else 0.0,
        "engine / bare loop": figures["engine"] / figures["bare loop"],
        "tokens/s": rows / figures["engine"],
    }
    if not streaming:
        bound = max(figures["reading"], figures["computing"])
        figures["bare loop / max(reading, computing)"] = figures["bare loop"] / bound
        figures["engine / max(reading, computing)"] = figures["engine"] / bound
    return figures


def show(model: Path, rows: int, figures: dict[str, float]) -> None:
    """One point in full."""
    print(f"{model}, {rows} rows")
    for label, value in figures.items():
        unit = " s" if label in ("reading", "computing", "bare loop", "engine") else ""
        print(f"  {label:38s} {value:,.3f}{unit}")


def table(points: Sequence[tuple[Path, int, dict[str, float]]]) -> str:
    """How cost grows with the work: a Markdown line for each point."""
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    for model, rows, figures in points:
        cells = [model.name, str(rows), f"{figures['streamed bytes per sweep'] / 1e9:.2f} GB"]
        for name in ("reading", "computing", "bare loop", "engine"):
            cells.append(f"{figures[name]:.2f} s" if name in figures else "")
        for name in ("engine / bare loop", "engine / max(reading, computing)"):
            cells.append(f"{1 / figures[name]:.2f}" if name in figures else "")
        cells.append(f"{figures['tokens/s']:.1f}")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="Sweeps against the machine's limits.")
    parser.add_argument("models", type=Path, nargs="+", metavar="MODEL")
    parser.add_argument("--ram", default="1536MiB")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--rows", type=int, nargs="+", default=[256])
    parser.add_argument("--context", type=int, default=100)
    parser.add_argument("--sweeps", type=int, default=6)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--streaming", action="store_true", help="hold no more of the model in memory than --ram")
    arguments = parser.parse_args()
    ram = parse_size(arguments.ram)
    points = []
    for model in arguments.models:
        for rows in arguments.rows:
            figures = measure(
                model,
                ram,
                arguments.threads,
                rows,
                arguments.context,
                arguments.sweeps,
                streaming=arguments.streaming,
            )
            points.append((model, rows, figures))
            if arguments.json:
                print(json.dumps({"model": str(model), "rows": rows, **figures}), flush=True)
            else:
                show(model, rows, figures)
    if len(points) > 1 and not arguments.json:
        print(table(points))


if __name__ == "__main__":
    main()
