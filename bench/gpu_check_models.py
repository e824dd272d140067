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
    worst, agreed, total = 0.0, 0, 0
    for row, logits in card.logits.items():
        for step in range(len(logits)):
            worst = max(worst, float((logits[step] - host.logits[row][step]).abs().max()))
            total += 1
            if card.tokens[row][step] != host.tokens[row][step]:
                break
            agreed += 1
    good = worst <= LIMITS[dtype] and not any(bool(logits.isnan().any()) for logits in card.logits.values())
    text = f"logits within {worst:.1e} (at most {LIMITS[dtype]:.0e}), {agreed} of {total} tokens equal"
    return Line(what, text, good, {"difference": worst, "equal": agreed, "tokens": total})


def against_transformers(family: str, model: Path, prompts: list[list[int]], card: Ran) -> Line:
    if importlib.util.find_spec("transformers") is None:
        return Line(f"{family} against transformers", "transformers is not installed")
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager").eval()
    worst = 0.0
    for row, prompt in enumerate(prompts):
        with torch.no_grad():
            truth = reference(torch.tensor([prompt + card.tokens[row][:-1]])).logits[0]
        worst = max(worst, float((truth[len(prompt) - 1 :] - card.logits[row]).abs().max()))
    return Line(f"{family} against transformers, fp32", f"logits within {worst:.1e}", worst <= LIMITS[torch.float32])


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
