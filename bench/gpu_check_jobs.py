"""Jobs as users have them: models of real shapes with a few layers, under --vram 8GiB, and the same by accelerate.

A model with few layers would lie on the card whole. To see what a large one does, all its weights are made to pass
through the rings: from host memory, then from the disk. The share is that of the link (or disk) at its measured rate.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from gpu_check import Context, Line
from gpu_check_models import on_card
from gpu_check_rows import Ran, prompts_of, write_model
from gpu_check_speed import disk_rate, link_rate
from make_checkpoint import Shape

from batchgen_lite.runtime.options import EngineOptions
from batchgen_lite.runtime.planner import Overrides

GIB = 1 << 30
QWEN3 = Shape(layers=6, hidden=2048, heads=32, kv_heads=4, head_dim=128, experts=128, top_k=8, width=768)
MIXTRAL = Shape(layers=3, hidden=4096, heads=32, kv_heads=8, head_dim=128, experts=8, top_k=2, width=14336)
ROWS, PROMPT, COUNT = 512, 48, 16
ACCELERATE_BATCH, ACCELERATE_STEPS = 64, 4


def jobs(context: Context) -> Iterator[Line]:
    link = link_rate(context)
    for family, shape in (("qwen3_moe", QWEN3), ("mixtral", MIXTRAL)):
        if context.left() < 60 and not context.dry:
            yield Line(family, "left out: too little time is left")
            continue
        if context.dry:
            small = {"layers": 1, "hidden": 32, "heads": 2, "kv_heads": 1, "head_dim": 16, "vocab": 64}
            shape = replace(shape, **small, experts=4, top_k=2, width=32)
        model = context.work / f"job-{family}"
        nbytes = write_model(model, family, shape, torch.float32 if context.dry else torch.bfloat16)
        yield Line(f"{family}, {shape.layers} layers", f"{nbytes / 1e9:.1f} GB written")
        disk, how = disk_rate(context)
        yield Line("disk", f"{disk / 1e9:.2f} GB/s, {how}")
        yield streamed(context, family, model, shape, "host", link)
        yield streamed(context, family, model, shape, "disk", min(disk, link))
        if family == "qwen3_moe":
            yield from beside_accelerate(context, model, shape)


def streamed(context: Context, family: str, model: Path, shape: Shape, tier: str, rate: float) -> Line:
    """Everything passes to the card in every sweep."""
    ran = generate(
        context, model, shape, Overrides(device_resident_bytes=0, resident_bytes=0 if tier == "disk" else None)
    )
    moved = ran.bytes_copied if tier == "host" else ran.bytes_read
    share = moved / rate / ran.seconds
    tokens = sum(len(row) for row in ran.tokens)
    text = (
        f"{tokens / ran.seconds:.0f} tokens/s, {moved / 1e9:.1f} GB in {ran.seconds:.1f} s = "
        f"{moved / ran.seconds / 1e9:.1f} GB/s, {100 * share:.0f} % of what the way can do"
    )
    data = {"seconds": ran.seconds, "bytes": moved, "rate": rate, "share": share, "says": ran.description}
    return Line(f"{family} streamed from {tier}", text, None, data)


def generate(context: Context, model: Path, shape: Shape, wish: Overrides) -> Ran:
    rows, prompt, count = (3, 3, 1) if context.dry else (ROWS, PROMPT, COUNT)
    # Without a card the pretended one has its own size.
    options = EngineOptions(vram=None if context.dry else 8 * GIB, overrides=wish)
    if not context.dry:
        options = replace(options, device=context.device)
    return on_card(context, model, prompts_of([prompt] * rows, shape.vocab), count, given=options)


def beside_accelerate(context: Context, model: Path, shape: Shape) -> Iterator[Line]:
    """The same rows with each at its best under 8 GiB; accelerate's time is estimated from a few steps."""
    ours = generate(context, model, shape, Overrides())
    yield Line(
        "ours, as planned", f"{ours.seconds:.1f} s; {ours.description['weights']}", data={"seconds": ours.seconds}
    )
    if context.dry:
        yield Line("accelerate", "not in a dry run")
        return
    missing = [name for name in ("transformers", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        yield Line("accelerate", f"{' and '.join(missing)} not installed: no comparison")
        return
    seconds = accelerate_seconds(context, model, shape)
    yield Line(
        "accelerate, estimated from a few steps",
        f"~{seconds:.0f} s: {seconds / ours.seconds:.1f} times as long",
        data={"seconds": seconds, "ratio": seconds / ours.seconds},
    )


def accelerate_seconds(context: Context, model: Path, shape: Shape) -> float:
    """Static batches: one prefill and a few decode steps of one batch, times what the job takes."""
    from transformers import AutoModelForCausalLM

    index = torch.device(context.device).index or 0
    loaded = AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.bfloat16, device_map="auto", max_memory={index: 7 * GIB, "cpu": 64 * GIB}
    ).eval()
    ids = torch.tensor(prompts_of([PROMPT] * ACCELERATE_BATCH, shape.vocab), device=context.device)
    times: list[float] = []
    cache = None
    with torch.inference_mode():
        for _ in range(ACCELERATE_STEPS):
            torch.cuda.synchronize()
            began = time.perf_counter()
            out = loaded(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache, ids = out.past_key_values, out.logits[:, -1:].argmax(-1)
            torch.cuda.synchronize()
            times.append(time.perf_counter() - began)
    del loaded
    torch.cuda.empty_cache()
    decode = sum(times[1:]) / len(times[1:])
    return ROWS / ACCELERATE_BATCH * (times[0] + (COUNT - 1) * decode)
