"""Run a job with llama.cpp through llama-cpp-python: continuous batching over its sequences, greedy, fixed lengths.

    python bench/rivals/llama_cpp_driver.py --model model-f16.gguf --prompts job.jsonl --result out.json \
        [--sequences 256] [--ubatch 2048] [--kv unified|per-sequence] [--load mmap|direct|memory] [--seconds 900]

``unified`` keeps one cache that all sequences share (sized for the longest that can be in flight together);
``per-sequence`` gives each its own, sized for the longest row. Rows end at their own length, never at an end token.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import llama_cpp
import numpy as np
from rivals.job_steps import Prompt, StepLog, outcome_of, read_prompts
from rivals.refill_schedule import Span, refill_steps, step_of

CELL_BLOCK = 256  # caches are sized in multiples of this
LOAD_MODES = {
    "mmap": llama_cpp.LLAMA_LOAD_MODE_MMAP,
    "direct": llama_cpp.LLAMA_LOAD_MODE_DIRECT_IO,
    "memory": llama_cpp.LLAMA_LOAD_MODE_NONE,
}


def cache_cells(prompts: Sequence[Prompt], sequences: int, unified: bool) -> int:
    """Cells that the cache needs in all."""
    lengths = sorted((len(prompt.ids) + prompt.new_tokens for prompt in prompts), reverse=True)
    if unified:
        return -(-sum(lengths[:sequences]) // CELL_BLOCK) * CELL_BLOCK
    return sequences * (-(-lengths[0] // CELL_BLOCK) * CELL_BLOCK)


def open_model(path: Path, load: str) -> Any:
    params = llama_cpp.llama_model_default_params()
    params.n_gpu_layers = 0
    params.load_mode = LOAD_MODES[load]
    model = llama_cpp.llama_model_load_from_file(str(path).encode(), params)
    if model is None:
        raise SystemExit(f"{path}: llama.cpp cannot load this file")
    return model


def open_context(model: Any, prompts: Sequence[Prompt], args: argparse.Namespace) -> Any:
    params = llama_cpp.llama_context_default_params()
    params.n_ctx = cache_cells(prompts, args.sequences, args.kv == "unified")
    params.n_batch = args.batch
    params.n_ubatch = args.ubatch
    params.n_seq_max = args.sequences
    # Each row samples at most once a step; by default buffers would be made for logits of every token of a batch.
    params.n_outputs_max = args.sequences
    params.kv_unified = args.kv == "unified"
    params.n_threads = params.n_threads_batch = args.threads
    params.offload_kqv = False
    context = llama_cpp.llama_init_from_model(model, params)
    if context is None:
        raise SystemExit(f"llama.cpp cannot make a context of {params.n_ctx} cells for {args.sequences} sequences")
    return context


def fill_batch(batch: Any, spans: Sequence[Span], tokens: Sequence[list[int]]) -> list[int]:
    """Write the spans' tokens into ``batch``; returns, per span, where its logits will be, or -1."""
    places, count = [], 0
    for span in spans:
        for position in range(span.start, span.stop):
            batch.token[count] = tokens[span.row][position]
            batch.pos[count] = position
            batch.n_seq_id[count] = 1
            batch.seq_id[count][0] = span.sequence
            batch.logits[count] = span.samples and position == span.stop - 1
            count += 1
        places.append(count - 1 if span.samples else -1)
    batch.n_tokens = count
    return places


def run_job(model: Any, context: Any, prompts: Sequence[Prompt], args: argparse.Namespace, log: StepLog) -> list[Any]:
    """Run steps until the job is done or the time is over; returns the tokens of all rows."""
    tokens = [list(prompt.ids) for prompt in prompts]
    vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    memory = llama_cpp.llama_get_memory(context)
    batch = llama_cpp.llama_batch_init(args.batch, 0, 1)
    for spans in refill_steps(prompts, args.sequences, args.batch):
        if log.over_time and log.enough:
            break
        began = time.monotonic()
        places = fill_batch(batch, spans, tokens)
        code = llama_cpp.llama_decode(context, batch)
        if code != 0:
            raise SystemExit(f"llama_decode returned {code} for a step of {batch.n_tokens} tokens")
        for span, place in zip(spans, places, strict=True):
            if place >= 0:
                logits = llama_cpp.llama_get_logits_ith(context, place)
                row = np.ctypeslib.as_array(ctypes.cast(logits, ctypes.POINTER(ctypes.c_float)), (vocabulary,))
                tokens[span.row].append(int(row.argmax()))
            if span.ends:
                llama_cpp.llama_memory_seq_rm(memory, span.sequence, -1, -1)
        step = step_of(spans, prompts)
        log.add(step.prompt_tokens, step.rows, began)
    llama_cpp.llama_batch_free(batch)
    return tokens


def main() -> None:
    parser = argparse.ArgumentParser(description="Run a job with llama.cpp.")
    parser.add_argument("--model", type=Path, required=True, help="GGUF file")
    parser.add_argument("--prompts", type=Path, required=True, help="job as bench/workloads.py writes it")
    parser.add_argument("--result", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--sequences", type=int, default=256, help="rows in flight (default 256)")
    parser.add_argument("--batch", type=int, default=2048, help="most tokens of a step (default 2048)")
    parser.add_argument("--ubatch", type=int, default=2048, help="tokens that go through the model at once")
    parser.add_argument("--kv", choices=["unified", "per-sequence"], default="per-sequence")
    parser.add_argument("--load", choices=sorted(LOAD_MODES), default="mmap")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seconds", type=float, default=900.0, help="extrapolate after this time (default 900)")
    parser.add_argument("--choice", type=float, default=1.0, help="share of experts a token chooses, to extrapolate by")
    parser.add_argument("--tokens", type=Path, help="write the generated tokens here, one row a line")
    args = parser.parse_args()

    began = time.monotonic()
    rows = read_prompts(args.prompts)
    # Longest outputs first, as ours starts them: a long row that is started late would run alone at the end.
    order = sorted(range(len(rows)), key=lambda row: (-rows[row].new_tokens, -len(rows[row].ids)))
    prompts = [rows[row] for row in order]
    args.sequences = min(args.sequences, len(prompts))
    llama_cpp.llama_backend_init()
    model = open_model(args.model, args.load)
    context = open_context(model, prompts, args)
    load_seconds = time.monotonic() - began
    log = StepLog(args.seconds)
    tokens = run_job(model, context, prompts, args, log)
    planned = [step_of(spans, prompts) for spans in refill_steps(prompts, args.sequences, args.batch)]
    settings = {name: getattr(args, name) for name in ("sequences", "batch", "ubatch", "kv", "load", "threads")}
    outcome_of("llama.cpp", settings, prompts, planned, log, load_seconds, args.choice).write(args.result)
    if args.tokens is not None:
        generated = {row: tokens[at][len(rows[row].ids) :] for at, row in enumerate(order)}
        args.tokens.write_text("".join(f"{generated[row]}\n" for row in range(len(rows))))


if __name__ == "__main__":
    main()
