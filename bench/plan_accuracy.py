"""How near ``plan`` comes to a run: the same job planned, then run, at several budgets with the disk throttled.

    python bench/plan_accuracy.py CHECKPOINT [--budgets 1GiB 1536MiB 2GiB] [--read-rate 400MB] [--workload uniform]

Needs the right to make control groups (see limits.py) unless ``--read-rate`` is 0. Every row ends by length, so the
number of tokens is known beforehand. Rates are probed anew under the same throttle, in a cache of their own, before
the first plan. Prints one JSON line a budget: forecast and measured seconds and tokens/s, and their ratios, of the
whole job and of its steady part, which ends where the plan sees the last rows begin. Exits with 1 if either ratio is
further from 1 than the tolerance, or if the machine was too busy to be measured.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from limits import limited
from sizes import parse_size
from workloads import WORKLOADS, write_prompts

RATIOS = ("measured_over_planned", "steady_measured_over_planned")
KNOWN = ("measured", "cached")  # sources of rates that are the machine's own


@dataclass(frozen=True, slots=True)
class Bench:
    """What all runs share. ``read_rate`` bytes/s, 0 = not throttled; ``threads`` None = as the command chooses."""

    checkpoint: Path
    prompts: Path
    read_rate: int
    environment: dict[str, str]
    threads: int | None = None

    def command(self, name: str, *flags: str) -> subprocess.CompletedProcess[str]:
        """One ``batchgen-lite`` command under the throttle."""
        words = [sys.executable, "-P", "-m", "batchgen_lite", name, "--model", str(self.checkpoint), "--device", "cpu"]
        words += ["--input", str(self.prompts), *flags]
        words += ["--threads", str(self.threads)] if self.threads else []
        with limited(read_rate=self.read_rate or None, path=self.checkpoint) as group:
            done = subprocess.run(group.command(words), env=self.environment, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"batchgen-lite {name} ended with {done.returncode}:\n{done.stderr[-2000:]}")
        return done


def compare(bench: Bench, budget: int, output: Path) -> dict[str, Any]:
    """Plan and run the job in ``budget`` bytes."""
    planned = json.loads(bench.command("plan", "--ram", str(budget), "--json").stdout)
    done = bench.command("generate", "--ram", str(budget), "--output", str(output), "--overwrite", "--progress", "json")
    events = [json.loads(line) for line in done.stderr.splitlines() if line.startswith("{")]
    summary = events[-1]
    seconds = float(summary["run_seconds"])
    rate = int(summary["tokens_decoded"]) / seconds
    steady = planned["steady_tokens"] / seconds_until(planned["steady_tokens"], events)
    return {
        "budget": budget,
        "rates": planned["rates"]["source"],
        "kernels": planned["rates"]["kernels"],
        "bound_by": planned["bound_by"],
        "planned_seconds": planned["seconds"],
        "measured_seconds": seconds,
        "planned_tokens_per_second": planned["decode_tokens_per_second"],
        "measured_tokens_per_second": round(rate, 3),
        "measured_over_planned": round(rate / planned["decode_tokens_per_second"], 3),
        "steady_planned_tokens_per_second": planned["steady_tokens_per_second"],
        "steady_measured_tokens_per_second": round(steady, 3),
        "steady_measured_over_planned": round(steady / planned["steady_tokens_per_second"], 3),
        "planned_sweeps": planned["sweep"]["count"],
        "measured_sweeps": summary["sweeps"],
        "computing_seconds": summary["computing_seconds"],
        "waiting_seconds": summary["waiting_seconds"],
        "read_bytes_per_second": summary["streaming_bytes_per_second"],
        "link_idle_share": summary["link_idle_share"],
        "io_bound_sweeps": summary["io_bound_sweeps"],
        "roofline_share": summary["roofline_share"],
        "peak_over_budget": round(summary["peak_ram_bytes"] / budget, 3),
    }


def seconds_until(tokens: int, events: Sequence[dict[str, Any]]) -> float:
    """Seconds from a run's begin until it had decoded ``tokens`` tokens, between two progress events in proportion.
    ``events``: of ``--progress json``, the summary last."""
    summary = events[-1]
    began = float(summary["time"]) - float(summary["run_seconds"])
    before = (0, began)
    for event in events:
        if event["event"] in ("progress", "summary") and event.get("tokens_decoded", 0) >= before[0]:
            after = (int(event["tokens_decoded"]), float(event["time"]))
            if after[0] >= tokens and after[0] > before[0]:
                return before[1] + (after[1] - before[1]) * (tokens - before[0]) / (after[0] - before[0]) - began
            before = after if after[0] > before[0] else (before[0], max(before[1], after[1]))
    raise ValueError(f"the run decoded {before[0]} tokens, fewer than the {tokens} of the plan's steady part")


def within(result: dict[str, Any], tolerance: float) -> bool:
    """Whether both ratios are near enough to 1, by rates and kernels that were measured."""
    measured = result["rates"] in KNOWN and result["kernels"] == "measured"
    return measured and all(abs(result[name] - 1) <= tolerance for name in RATIOS)


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare plans with runs at several budgets.")
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--budgets", type=parse_size, nargs="+", default=[1 << 30, 1536 << 20, 2 << 30])
    parser.add_argument("--read-rate", type=parse_size, default=400_000_000, help="bytes/s, 0 = no throttle")
    parser.add_argument("--workload", choices=sorted(WORKLOADS), default="uniform")
    parser.add_argument("--limit", type=int, help="keep about this many rows")
    parser.add_argument("--threads", type=int, help="compute threads (default: as the command chooses)")
    parser.add_argument(
        "--tolerance", type=float, default=0.20, help="exit 1 if a ratio is further from 1 (default 0.2)"
    )
    args = parser.parse_args()
    vocab = int(json.loads((args.checkpoint / "config.json").read_text())["vocab_size"])
    with tempfile.TemporaryDirectory() as folder:
        prompts = Path(folder) / "prompts.jsonl"
        write_prompts(prompts, WORKLOADS[args.workload], vocab, args.limit)
        # The probe must see the throttled disk, and the user's own cache must not.
        environment = {**os.environ, "XDG_CACHE_HOME": str(Path(folder) / "cache")}
        bench = Bench(args.checkpoint, prompts, args.read_rate, environment, args.threads)
        results = []
        for budget in args.budgets:
            results.append(compare(bench, budget, Path(folder) / "out.jsonl"))
            print(json.dumps(results[-1]), flush=True)
    sys.exit(0 if all(within(result, args.tolerance) for result in results) else 1)


if __name__ == "__main__":
    main()
