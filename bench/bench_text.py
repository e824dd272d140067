"""What text costs: prompts to tokens, tokens to text and stops, a row's begin, and the journal.

    python bench/bench_text.py [--rows 256] [--tokens 64] [--profile]

Generated tokens go through what a job does with each: detokenise, look for stops, journal (jobs/row_output.py,
jobs/sink.py). Files lie in a temporary folder; what syncing them costs is the disk's and not measured. Reference: a
little plain Python (figures.py).
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import os
import pstats
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from figures import Figure, best, python_unit, show
from tiny_tokenizer import write_tokenizer
from tokenizers import Tokenizer as Backend

from batchgen_lite.jobs.done_table import Status
from batchgen_lite.jobs.journal import Journal
from batchgen_lite.jobs.layout import JobPaths
from batchgen_lite.jobs.sink import ResultSink
from batchgen_lite.runtime.interface import SampledToken
from batchgen_lite.sampling_params import SamplingParams
from batchgen_lite.text.row_text import RowText
from batchgen_lite.text.tokenizer import SpecialTokens, Tokenizer

VOCABULARY = 32_000
PLAIN = SamplingParams(max_tokens=1 << 30, ignore_eos=True)
STOPPING = SamplingParams(max_tokens=1 << 30, ignore_eos=True, stop=("\n\nQuestion:", "<end>", "###"))


def make_tokenizer() -> Tokenizer:
    """Byte-level, of a common size."""
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(Path(folder), VOCABULARY)
        return Tokenizer(Backend.from_file(str(Path(folder, "tokenizer.json"))), SpecialTokens())


def random_ids(count: int) -> list[int]:
    rng = random.Random(5)
    return [rng.randrange(300, VOCABULARY) for _ in range(count)]


def detokenise(tokenizer: Tokenizer, params: SamplingParams, rows: int, ids: list[int]) -> Callable[[], None]:
    """Sweeps over ``rows`` rows, each of which takes the next of ``ids``; the rows' begin is not part of it."""

    def run() -> None:
        for ident in ids:
            for text in texts:
                text.accept(ident)

    texts = [RowText(tokenizer, params, ()) for _ in range(rows)]
    return run


def journal_seconds(rows: int, tokens: int) -> tuple[float, float, float]:
    """Seconds per journalled token, per finished row, and per token read back."""
    sampled = SampledToken(1234)
    with tempfile.TemporaryDirectory() as folder:
        paths = JobPaths(Path(folder, "out.jsonl"))
        sink = ResultSink(paths, sync_seconds=3600.0)

        async def sweeps() -> float:
            started = time.thread_time()
            for _ in range(tokens):
                for row in range(rows):
                    sink.token(row, sampled, scored=False)
                await asyncio.sleep(0)  # the flush
            return time.thread_time() - started

        noting = asyncio.run(sweeps())
        started = time.thread_time()
        Journal(Path(folder, "out.jsonl.journal")).close()
        reading = time.thread_time() - started
        line = b'{"custom_id": "row", "text": "' + b"x" * 200 + b'"}\n'

        async def ends() -> float:
            started = time.thread_time()
            for row in range(rows):
                sink.record(row, line, Status.STOPPED)
            return time.thread_time() - started

        ending = asyncio.run(ends())
        sink.close()
    return noting / (rows * tokens), ending / rows, reading / (rows * tokens)


def measure(rows: int = 256, tokens: int = 64, repeats: int = 3) -> list[Figure]:
    """For ``bench/run.py``."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the reference has one core too
    unit = python_unit()
    tokenizer = make_tokenizer()
    ids = random_ids(tokens)
    prompts = [tokenizer.decode(random_ids(tokens)) for _ in range(rows)]
    known = sum(map(len, tokenizer.encode_batch(prompts, True)))
    seconds = {
        "tokenise, token": best(lambda: tokenizer.encode_batch(prompts, True), repeats) / known,
        "begin a row": best(lambda: [RowText(tokenizer, PLAIN, ()) for _ in range(rows)], repeats) / rows,
    }
    for name, params in (("detokenise, token", PLAIN), ("detokenise with stops, token", STOPPING)):
        runs = [best(detokenise(tokenizer, params, rows, ids), 1) for _ in range(repeats)]
        seconds[name] = min(runs) / (rows * tokens)
    journal = [journal_seconds(rows, tokens) for _ in range(repeats)]
    for name, values in zip(
        ("journal, token", "journal, record", "journal read, token"), zip(*journal, strict=True), strict=True
    ):
        seconds[name] = min(values)
    unit = min(unit, python_unit())
    return [Figure(name, value * 1e6, "us", value / unit) for name, value in seconds.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description="What text and the journal cost per token.")
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--profile", action="store_true", help="show where the time goes")
    arguments = parser.parse_args()
    if arguments.profile:
        with cProfile.Profile() as profile:
            measure(arguments.rows, arguments.tokens, 1)
        pstats.Stats(profile).sort_stats("tottime").print_stats(28)
        return
    show(measure(arguments.rows, arguments.tokens))


if __name__ == "__main__":
    main()
