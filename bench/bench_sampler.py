"""What sampling costs per row: greedy, plain temperature, nucleus, and a usual mixture of all filters.

    python bench/bench_sampler.py [--vocab 152000] [--rows 32]

Reference: a copy in memory of one row of logits.
"""

from __future__ import annotations

import argparse

import torch
from figures import Figure, best, copy_rate, show

from batchgen_lite.runtime.sampler import Sampler, SampleRow
from batchgen_lite.sampling_params import SamplingParams

KINDS = {
    "greedy": SamplingParams(temperature=0.0),
    "temperature": SamplingParams(temperature=0.8),
    "top_p": SamplingParams(temperature=0.8, top_p=0.9),
    "top_k, top_p": SamplingParams(temperature=0.8, top_p=0.9, top_k=20),
    "penalty": SamplingParams(temperature=0.0, repetition_penalty=1.1),
}


def measure(vocab: int = 32_000, rows: int = 32, repeats: int = 4) -> list[Figure]:
    """For ``bench/run.py``, on one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        generator = torch.Generator().manual_seed(1)
        logits = 2 * torch.randn(rows, vocab, generator=generator)
        logits[:, torch.randperm(vocab, generator=generator)[:30]] += 12.0  # a few likely ones, as models have it
        copying = vocab * 4 / copy_rate()
        sampler = Sampler()
        figures = []
        for name, params in KINDS.items():
            batch = [SampleRow(params, 7, row, 5, range(64), range(32)) for row in range(rows)]
            seconds = best(lambda batch=batch: sampler.sample(logits, batch), repeats) / rows  # type: ignore[misc]
            figures.append(Figure(f"{name}, row", seconds * 1e6, "us", seconds / copying))
        return figures
    finally:
        torch.set_num_threads(threads)


def main() -> None:
    parser = argparse.ArgumentParser(description="What sampling costs per row.")
    parser.add_argument("--vocab", type=int, default=152_000)
    parser.add_argument("--rows", type=int, default=32)
    arguments = parser.parse_args()
    show(measure(arguments.vocab, arguments.rows))


if __name__ == "__main__":
    main()
