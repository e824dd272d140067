"""Whole models on the card: the same logits as on the CPU, whose own equality with transformers the tests prove, and as
transformers where that is installed; and a row's bits in any company."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from pathlib import Path
from unittest.mock import patch

import torch
from gpu_check import Context, Line
from gpu_check_rows import Ran, prompts_of, run, write_model
from make_checkpoint import Shape

from batchgen_lite.runtime import build
from batchgen_lite.runtime.options import EngineOptions

FAMILIES = ("llama", "qwen3_moe", "mixtral")
LIMITS = {torch.float32: 1e-3, torch.bfloat16: 0.25}
"""Of the largest difference of logits of about 3: rounding to bf16 at every layer leaves some tenths."""


def small_shape(context: Context, family: str) -> Shape:
    if context.dry:
        sizes = {"layers": 1, "hidden": 32, "heads": 2, "kv_heads": 1, "head_dim": 16, "width": 32, "vocab": 64}
    else:
        sizes = {"layers": 4, "hidden": 512, "heads": 8, "kv_heads": 2, "head_dim": 64, "width": 256, "vocab": 4096}
    experts, top_k = (1, 1) if family == "llama" else (4, 2) if context.dry or family == "mixtral" else (32, 4)
    return Shape(**sizes, experts=experts, top_k=top_k)


def on_card(
    context: Context,
    model: Path,
    prompts: list[list[int]],
    count: int,
    *,
    given: EngineOptions | None = None,
    keep: Sequence[int] = (),
) -> Ran:
    """A run on the card; of a dry run on a device whose streams are pretended and whose memory is the host's."""
    options = given or EngineOptions(device="auto" if context.dry else context.device)
    if not context.dry:
        return run(model, prompts, count, options, keep=keep)
    from gpu_check_pretence import pretended_card

    with patch.object(build, "open_device", lambda *_: pretended_card()):
        return run(model, prompts, count, options, keep=keep)


def equality(context: Context) -> Iterator[Line]:
    lengths, count = ([2, 5], 2) if context.dry else ([3, 40, 130, 300, 7, 64], 8)
    for family in FAMILIES:
        shape = small_shape(context, family)
        for dtype in (torch.float32,) if context.dry else (torch.float32, torch.bfloat16):
            model = context.work / f"{family}-{str(dtype).removeprefix('torch.')}"
            write_model(model, family, shape, dtype)
            prompts = prompts_of(lengths, shape.vocab)
            keep = range(len(prompts))
            card = on_card(context, model, prompts, count, keep=keep)
            host = run(model, prompts, count, EngineOptions(device="cpu"), keep=keep)
            yield compared(f"{family} {str(dtype).removeprefix('torch.')} against our CPU path", card, host, dtype)
            if dtype == torch.float32:
                yield against_transformers(family, model, prompts, card)
            yield Line(f"{family} maths", card.description.get("maths", "not said"))


def compared(what: str, card: Ran, host: Ran, dtype: torch.dtype) -> Line:
    """Up to the first token that differs: behind it the rows have different contexts."""
    differences, agreed = [], 0
    for row, logits in card.logits.items():
        for step in range(len(logits)):
            differences.append(float((logits[step] - host.logits[row][step]).abs().max()))
            if card.tokens[row][step] != host.tokens[row][step]:
                break
            agreed += 1
    text, good, data = judged(differences, dtype)
    return Line(what, f"{text}; {agreed} of {len(differences)} tokens equal", good, data)


def judged(differences: list[float], dtype: torch.dtype) -> tuple[str, bool, dict[str, object]]:
    """Nearly all steps have to be within the limit: a router that stood at an edge may choose otherwise, and what
    comes behind it is then another computation. NaN is within no limit."""
    limit = LIMITS[dtype]
    within = sum(difference <= limit for difference in differences) / len(differences)
    worst, middle = max(differences), sorted(differences)[len(differences) // 2]
    text = f"logits off by {middle:.1e} in the median, {worst:.1e} at most; {100 * within:.0f} % within {limit:.0e}"
    return text, within >= 0.9, {"median": middle, "worst": worst, "within": within}


def against_transformers(family: str, model: Path, prompts: list[list[int]], card: Ran) -> Line:
    what = f"{family} against transformers, fp32"
    if importlib.util.find_spec("transformers") is None:
        return Line(what, "transformers is not installed")
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager").eval()
    differences = []
    for row, prompt in enumerate(prompts):
        with torch.no_grad():
            truth = reference(torch.tensor([prompt + card.tokens[row][:-1]])).logits[0]
        differences += (truth[len(prompt) - 1 :] - card.logits[row]).abs().amax(-1).tolist()
    text, good, data = judged(differences, torch.float32)
    return Line(what, text, good, data)


def invariance(context: Context) -> Iterator[Line]:
    """Row 3, generated alone, among 7, among 500, and with everything streamed through small rings."""
    shape = small_shape(context, "qwen3_moe")
    dtype = torch.float32 if context.dry else torch.bfloat16
    model = context.work / "invariance"
    write_model(model, "qwen3_moe", shape, dtype)
    many, count = (5, 1) if context.dry else (500, 8)
    lengths = [2, 1, 3, 4, 1] if context.dry else [10 + 7 * (row % 40) for row in range(many)]
    prompts = prompts_of(lengths, shape.vocab)
    alone = on_card(context, model, prompts[3:4], count, keep=[0])
    for size in (min(7, many),) if context.dry else (7, many):
        other = on_card(context, model, prompts[:size], count, keep=[3])
        same = torch.equal(alone.logits[0], other.logits[3])
        yield Line(f"row alone and among {size}", "the same bits" if same else "other bits", same)
