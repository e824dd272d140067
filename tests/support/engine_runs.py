"""Runs of the real engine over token ids, for tests: what every row got, and the logits behind it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from batchgen_lite.offload.spill_file import SpillOptions
from batchgen_lite.runtime.build import build_engine
from batchgen_lite.runtime.interface import Finish, RequestSize, RunSummary, SampledToken, SequenceRequest
from batchgen_lite.runtime.options import EngineOptions
from batchgen_lite.runtime.planner import MemoryPlan, Overrides
from batchgen_lite.runtime.sampler import Sampler
from batchgen_lite.sampling_params import SamplingParams

ON_SIM: dict[str, Any] = {
    "device": "sim",
    "resident_bytes": 0,
    "ring_bytes": 1 << 20,
    "device_resident_bytes": 0,
    "device_ring_bytes": 1 << 20,
}
"""Options of ``run_engine`` for the simulated device, every weight on its way from the disk to the device."""


class Collecting:
    """One row's output: keeps the tokens, ends at ``max_tokens`` only."""

    def __init__(self, tokens: list[int], ended: list[int], errors: dict[int, BaseException], index: int) -> None:
        self.tokens, self.ended, self.errors, self.index = tokens, ended, errors, index

    def accept(self, token: SampledToken) -> Finish | None:
        self.tokens.append(token.token)
        return None

    def done(self, finish: Finish) -> None:
        self.ended.append(self.index)

    def failed(self, error: BaseException) -> None:
        self.errors[self.index] = error


class Prompts:
    """A RequestSource over token ids."""

    def __init__(self, prompts: Sequence[Sequence[int]], params: SamplingParams) -> None:
        self.prompts, self.params = prompts, params
        self.tokens: list[list[int]] = [[] for _ in prompts]
        self.ended: list[int] = []
        self.errors: dict[int, BaseException] = {}

    def __len__(self) -> int:
        return len(self.prompts)

    def size(self, index: int) -> RequestSize:
        return RequestSize(len(self.prompts[index]), self.params.max_tokens)

    def open(self, index: int) -> tuple[SequenceRequest, Collecting]:
        request = SequenceRequest(index, self.prompts[index], self.params, seed=7)
        return request, Collecting(self.tokens[index], self.ended, self.errors, index)

    def failed(self, index: int, error: BaseException) -> None:
        self.errors[index] = error


@dataclass
class Result:
    """What a run gave. ``logits[row]``: fp32 [generated, vocab], the model's own, token by token."""

    tokens: list[list[int]]
    summary: RunSummary
    plan: MemoryPlan
    errors: dict[int, BaseException]
    logits: dict[int, torch.Tensor] = field(default_factory=dict)


def run_engine(
    path: Path,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    *,
    keep_logits: bool = False,
    threads: int | None = None,
    params: SamplingParams | None = None,
    ram: int | None = None,
    kv_dtype: str = "auto",
    device: str = "cpu",
    vram: int | None = None,
    spill: SpillOptions | None = None,
    **overrides: Any,
) -> Result:
    """Generate ``max_tokens`` tokens for every prompt; ``overrides`` as planner.Overrides."""
    kept: dict[int, list[torch.Tensor]] = {index: [] for index in range(len(prompts))}
    options = EngineOptions(
        ram=ram,
        threads=threads,
        kv_dtype=kv_dtype,
        device=device,
        vram=vram,
        spill=spill,
        overrides=Overrides(**overrides),
    )
    engine = build_engine(path, options)
    source = Prompts(prompts, params or SamplingParams(temperature=0.0, max_tokens=max_tokens))
    original = Sampler.sample

    def sample(self: Sampler, logits: torch.Tensor, rows: Sequence[object]) -> list[SampledToken]:
        for line, row in zip(logits, rows, strict=True):
            kept[row.row].append(line.clone())  # type: ignore[attr-defined]
        return original(self, logits, rows)  # type: ignore[arg-type]

    try:
        if keep_logits:
            Sampler.sample = sample  # type: ignore[method-assign,assignment]
        plan = engine.plan(source)
        summary = asyncio.run(engine.run(source))
    finally:
        Sampler.sample = original  # type: ignore[method-assign]
        engine.close()
    logits = {index: torch.stack(rows) for index, rows in kept.items() if rows}
    return Result(source.tokens, summary, plan, source.errors, logits)


def random_prompts(lengths: Sequence[int], vocab: int = 211, seed: int = 0) -> list[list[int]]:
    """Prompts of the given lengths, token ids from 3 on."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, vocab, (length,), generator=generator).tolist() for length in lengths]
