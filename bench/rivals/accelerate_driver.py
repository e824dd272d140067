"""Run a job with transformers and accelerate's disk offload: static batches, sorted by length, left padding, greedy.

    python bench/rivals/accelerate_driver.py --model checkpoint/ --prompts job.jsonl --result out.json \
        [--batch 64] [--memory 1200MiB] [--dtype bfloat16] [--experts eager] [--seconds 900]

As a skilled user would: rows of like length share a batch, a batch ends with its last row. ``--memory`` is what
accelerate may fill with weights; the rest stays on disk, and a step reads it. 0 puts everything on disk.
"""

from __future__ import annotations

import argparse
import inspect
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from rivals.job_steps import ENOUGH_STEPS, Prompt, Step, StepLog, outcome_of, read_prompts
from sizes import parse_size
from transformers import AutoModelForCausalLM, DynamicCache


def batches_of(prompts: Sequence[Prompt], size: int) -> list[list[Prompt]]:
    """Batches of rows of like prompt length, the middle ones first: whoever stops early has seen typical ones.

    A user does not know how long answers will be, so only the prompts' lengths count."""
    ordered = sorted(prompts, key=lambda prompt: len(prompt.ids))
    batches = [ordered[start : start + size] for start in range(0, len(ordered), size)]
    middle = (len(batches) - 1) / 2
    return [batches[index] for index in sorted(range(len(batches)), key=lambda index: abs(index - middle))]


def planned_steps(batches: Sequence[Sequence[Prompt]]) -> list[Step]:
    """All steps of the job: one prefill a batch, then as many as its longest answer needs."""
    steps = []
    for batch in batches:
        steps.append(Step(len(batch) * max(len(prompt.ids) for prompt in batch), 0))
        steps.extend([Step(0, len(batch))] * (max(prompt.new_tokens for prompt in batch) - 1))
    return steps


def pad_left(batch: Sequence[Prompt]) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and attention mask [B, T] with the padding in front."""
    width = max(len(prompt.ids) for prompt in batch)
    ids = torch.zeros(len(batch), width, dtype=torch.long)
    mask = torch.zeros(len(batch), width, dtype=torch.long)
    for row, prompt in enumerate(batch):
        ids[row, width - len(prompt.ids) :] = torch.tensor(prompt.ids)
        mask[row, width - len(prompt.ids) :] = 1
    return ids, mask


def run_batch(model: Any, batch: Sequence[Prompt], log: StepLog) -> list[list[int]]:
    """Generate all rows of one batch; after time is over, only as many steps as an estimate needs."""
    ids, mask = pad_left(batch)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    # Kept here rather than taken from the outputs: releases of transformers differ in what they call it.
    cache_name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    cache = {cache_name: DynamicCache(config=model.config)}
    # By number, not as logits_to_keep=1: that takes a view with gaps between rows, for which torch.matmul copies the
    # whole vocabulary's weights once a row (2 GB for 32 rows here).
    last = torch.tensor([-1])
    generated: list[torch.Tensor] = []
    for number in range(max(prompt.new_tokens for prompt in batch)):
        if log.over_time and (log.enough or number > ENOUGH_STEPS):
            break
        began = time.monotonic()
        out = model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            use_cache=True,
            logits_to_keep=last,
            **cache,
        )
        step_tokens = ids.numel() if number == 0 else 0
        ids = out.logits[:, -1].argmax(-1, keepdim=True)
        generated.append(ids)
        mask = torch.cat([mask, torch.ones_like(ids)], dim=1)
        positions = positions[:, -1:] + 1
        log.add(step_tokens, 0 if number == 0 else len(batch), began)
    rows: list[list[int]] = torch.cat(generated, dim=1).tolist() if generated else [[] for _ in batch]
    return [row[: prompt.new_tokens] for row, prompt in zip(rows, batch, strict=True)]


def load_model(args: argparse.Namespace, folder: str) -> Any:
    placement: dict[str, Any] = {}
    if args.memory is not None:
        placement = {"device_map": "auto", "max_memory": {"cpu": args.memory}, "offload_folder": folder}
    if args.experts is not None:
        placement["experts_implementation"] = args.experts
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=getattr(torch, args.dtype), **placement)
    return model.eval()


def main() -> None:
    parser = argparse.ArgumentParser(description="Run a job with transformers and accelerate's disk offload.")
    parser.add_argument("--model", type=Path, required=True, help="checkpoint directory")
    parser.add_argument("--prompts", type=Path, required=True, help="job as bench/workloads.py writes it")
    parser.add_argument("--result", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--batch", type=int, default=64, help="rows a batch (default 64)")
    parser.add_argument("--memory", type=parse_size, help="for weights; without it all weights are loaded")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--experts", help="transformers' way with experts: eager, grouped_mm, batched_mm")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seconds", type=float, default=900.0, help="extrapolate after this time (default 900)")
    parser.add_argument("--scratch", type=Path, help="where accelerate may put weights (default: beside the result)")
    parser.add_argument("--choice", type=float, default=1.0, help="share of experts a token chooses, to extrapolate by")
    parser.add_argument("--tokens", type=Path, help="write the generated tokens here, one row a line, in batch order")
    args = parser.parse_args()

    began = time.monotonic()
    torch.set_num_threads(args.threads)
    prompts = read_prompts(args.prompts)
    batches = batches_of(prompts, args.batch)
    with tempfile.TemporaryDirectory(dir=args.scratch or args.result.parent) as folder, torch.inference_mode():
        model = load_model(args, folder)
        load_seconds = time.monotonic() - began
        log = StepLog(args.seconds)
        rows: list[list[int]] = []
        for batch in batches:
            if log.over_time and log.enough:
                break
            rows.extend(run_batch(model, batch, log))
        settings = {name: getattr(args, name) for name in ("batch", "memory", "dtype", "experts", "threads")}
        planned = planned_steps(batches)
        outcome_of("accelerate", settings, prompts, planned, log, load_seconds, args.choice).write(args.result)
    if args.tokens is not None:
        args.tokens.write_text("".join(f"{row}\n" for row in rows))


if __name__ == "__main__":
    main()
