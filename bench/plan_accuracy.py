"""How near ``plan`` comes to a run: the same job planned, then run, at several budgets with the disk throttled.

    python bench/plan_accuracy.py CHECKPOINT [--budgets 1GiB 1536MiB 2GiB] [--read-rate 400MB] [--workload uniform]

Needs the right to make control groups (see limits.py) unless ``--read-rate`` is 0. Every row ends by length, so the
number of tokens is known beforehand. Rates are probed anew under the same throttle, in a cache of their own, before
the first plan. Prints one JSON line a budget: forecast and measured seconds and tokens/s, and their ratios.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from limits import limited
from sizes import parse_size
from workloads import WORKLOADS, write_prompts


@dataclass(frozen=True, slots=True)
class Bench:
    """What all runs share. ``read_rate`` bytes/s, 0 = not throttled."""

    checkpoint: Path
    prompts: Path
    read_rate: int
    environment: dict[str, str]

    def command(self, name: str, *flags: str) -> subprocess.CompletedProcess[str]:
        """One ``batchgen-lite`` command under the throttle."""
        words = [sys.executable, "-P", "-m", "batchgen_lite", name, "--model", str(self.checkpoint)]
        words += ["--input", str(self.prompts), *flags]
        with limited(read_rate=self.read_rate or None, path=self.checkpoint) as group:
            return subprocess.run(
                group.command(words), env=self.environment, capture_output=True, text=True, check=True
            )


def compare(bench: Bench, budget: int, output: Path) -> dict[str, Any]:
    """Plan and run the job in ``budget`` bytes."""
    planned = json.loads(bench.command("plan", "--ram", str(budget), "--json").stdout)
    done = bench.command("generate", "--ram", str(budget), "--output", str(output), "--overwrite", "--progress", "json")
    summary = json.loads(done.stderr.strip().splitlines()[-1])
    seconds = float(summary["run_seconds"])
    decoded = int(summary["tokens_decoded"])
    return {
        "budget": budget,
        "bound_by": planned["bound_by"],
        "planned_seconds": planned["seconds"],
        "measured_seconds": seconds,
        "planned_tokens_per_second": planned["decode_tokens_per_second"],
        "measured_tokens_per_second": round(decoded / seconds, 3),
        "measured_over_planned": round(decoded / seconds / planned["decode_tokens_per_second"], 3),
        "planned_sweeps": planned["sweep"]["count"],
        "measured_sweeps": summary["sweeps"],
        "peak_over_budget": round(summary["peak_ram_bytes"] / budget, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare plans with runs at several budgets.")
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--budgets", type=parse_size, nargs="+", default=[1 << 30, 1536 << 20, 2 << 30])
    parser.add_argument("--read-rate", type=parse_size, default=400_000_000, help="bytes/s, 0 = no throttle")
    parser.add_argument("--workload", choices=sorted(WORKLOADS), default="uniform")
    parser.add_argument("--limit", type=int, help="keep about this many rows")
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
        bench = Bench(args.checkpoint, prompts, args.read_rate, environment)
        results = [compare(bench, budget, Path(folder) / "out.jsonl") for budget in args.budgets]
    for result in results:
        print(json.dumps(result))
    wrong = [result for result in results if abs(result["measured_over_planned"] - 1) > args.tolerance]
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
