"""The jobs that are measured: how many prompts, how long, and how much each generates.

Prompts are random token ids and every row ignores the end token, so all engines do the same work whatever their
tokenizer or arithmetic. Lengths are drawn once from a fixed seed.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

FIRST_WORD = 300  # ids below are specials and bytes of the tokenizers in use
# Quantile 0.99 of the normal distribution: exp(Z99 * sigma) is the ratio p99 / p50 of a log-normal one.
Z99 = 2.3263


@dataclass(frozen=True, slots=True)
class Row:
    """One prompt of ``prompt_tokens`` ids that generates exactly ``new_tokens``."""

    prompt_tokens: int
    new_tokens: int


@dataclass(frozen=True, slots=True)
class Workload:
    """A named job. ``lengths`` draws its rows from a generator."""

    name: str
    about: str
    lengths: Callable[[np.random.Generator], list[Row]]
    seed: int = 20240607


def log_normal(rng: np.random.Generator, count: int, median: float, p99_over_p50: float = 4.0) -> list[int]:
    """``count`` whole lengths >= 1 with this median and this ratio between the percentiles 99 and 50."""
    sigma = np.log(p99_over_p50) / Z99
    return [max(1, int(value)) for value in np.rint(median * np.exp(sigma * rng.standard_normal(count)))]


def uniform(rng: np.random.Generator) -> list[Row]:
    return [Row(int(n), 32) for n in rng.integers(16, 128, size=512, endpoint=True)]


def chat(rng: np.random.Generator) -> list[Row]:
    pairs = zip(log_normal(rng, 512, 48), log_normal(rng, 512, 16), strict=True)
    return [Row(prompt, new) for prompt, new in pairs]


def prefill(rng: np.random.Generator) -> list[Row]:
    return [Row(int(n), 4) for n in rng.integers(450, 550, size=128, endpoint=True)]


def stragglers(rng: np.random.Generator) -> list[Row]:
    """Four rows in the middle of the file are twenty times as long as the others, in and out."""
    rows = [Row(int(n), 16) for n in rng.integers(24, 40, size=128, endpoint=True)]
    for index in (19, 51, 83, 115):
        rows[index] = Row(rows[index].prompt_tokens * 20, rows[index].new_tokens * 20)
    return rows


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("uniform", "512 prompts of 16-128 tokens, 32 new tokens each", uniform),
        Workload("chat", "512 prompts, median 48 tokens in and 16 out, log-normal with p99/p50 of 4", chat),
        Workload("prefill", "128 prompts of about 500 tokens, 4 new tokens each", prefill),
        Workload("stragglers", "128 prompts of about 32 tokens, 16 out; four are 20 times as long", stragglers),
    )
}


def rows_of(workload: Workload, limit: int | None = None) -> list[Row]:
    """The workload's rows, or every n-th so that about ``limit`` remain, for quick runs."""
    rows = workload.lengths(np.random.default_rng(workload.seed))
    return rows if limit is None or limit >= len(rows) else rows[:: -(-len(rows) // limit)]


def prompts_of(workload: Workload, vocab: int, limit: int | None = None) -> Iterator[tuple[Row, list[int]]]:
    """Rows with their token ids, all between ``FIRST_WORD`` and ``vocab`` - 1."""
    rng = np.random.default_rng(workload.seed + 1)
    low = min(FIRST_WORD, vocab - 1)
    for row in rows_of(workload, limit):
        yield row, rng.integers(low, vocab, size=row.prompt_tokens).tolist()


def write_prompts(path: Path, workload: Workload, vocab: int, limit: int | None = None) -> int:
    """Write the job as JSON lines with ``token_ids``; returns the number of lines."""
    count = 0
    with path.open("w", encoding="utf-8") as file:
        for row, ids in prompts_of(workload, vocab, limit):
            line = {
                "custom_id": f"{workload.name}-{count}",
                "token_ids": ids,
                "max_tokens": row.new_tokens,
                "ignore_eos": True,
            }
            file.write(json.dumps(line) + "\n")
            count += 1
    return count


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a workload's prompts as JSON lines of token ids.")
    parser.add_argument("workload", choices=sorted(WORKLOADS))
    parser.add_argument("output", type=Path)
    parser.add_argument("--vocab", type=int, default=32000, help="the model's vocabulary (default 32000)")
    parser.add_argument("--limit", type=int, help="keep about this many rows")
    args = parser.parse_args()
    workload = WORKLOADS[args.workload]
    count = write_prompts(args.output, workload, args.vocab, args.limit)
    print(f"{args.output}: {count} prompts; {workload.about}")


if __name__ == "__main__":
    main()
