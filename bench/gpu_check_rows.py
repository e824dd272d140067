"""Checkpoints written on the spot, and runs of the engine over token ids, of which tokens and logits are kept."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import sqrt
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from make_checkpoint import Shape, plan_model
from safetensors_stream import Planned, write_shard

from batchgen_lite.runtime.build import build_engine
from batchgen_lite.runtime.interface import Finish, RequestSize, RunSummary, SampledToken, SequenceRequest
from batchgen_lite.runtime.options import EngineOptions
from batchgen_lite.runtime.sampler import Sampler
from batchgen_lite.sampling_params import SamplingParams


def write_model(path: Path, family: str, shape: Shape, dtype: torch.dtype) -> int:
    """A random checkpoint of a family ("qwen3_moe", "mixtral", "llama"); returns its bytes."""
    path.mkdir(parents=True)
    generator = torch.Generator().manual_seed(0)

    def make(planned: Planned) -> torch.Tensor:
        # A few MB of random numbers, repeated: drawing gigabytes anew would take the time that measuring needs.
        count = 1
        for size in planned.shape:
            count *= size
        drawn = torch.randn(min(count, 1 << 20), generator=generator)
        drawn = drawn.repeat(-(-count // drawn.numel()))[:count] if count > drawn.numel() else drawn
        return (drawn.view(planned.shape) * planned.std + planned.mean).to(dtype)

    name = str(dtype).removeprefix("torch.")
    tensors = list(plan_model(shape, 1.5)) if family == "qwen3_moe" else list(_plan(family, shape))
    write_shard(path / "model.safetensors", tensors, dtype, make)
    config = shape.config(name)
    if family != "qwen3_moe":
        config |= {
            "architectures": [{"mixtral": "MixtralForCausalLM", "llama": "LlamaForCausalLM"}[family]],
            "model_type": family,
            "intermediate_size": shape.width,
        }
        config |= {"num_local_experts": shape.experts, "num_experts_per_tok": shape.top_k, "sliding_window": None}
        for key in ("num_experts", "moe_intermediate_size", "norm_topk_prob", "decoder_sparse_step", "mlp_only_layers"):
            del config[key]
    (path / "config.json").write_text(json.dumps(config))
    return sum(tensor.nbytes(dtype) for tensor in tensors)


def _plan(family: str, shape: Shape) -> Iterator[Planned]:
    """Tensors of Llama, and of Mixtral, which is the same with experts."""
    into, onto = 1 / sqrt(shape.hidden), sqrt(2 * shape.layers)
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    yield Planned("model.embed_tokens.weight", (shape.vocab, shape.hidden), 1.0)
    for layer in range(shape.layers):
        base = f"model.layers.{layer}"
        yield Planned(f"{base}.input_layernorm.weight", (shape.hidden,), 0.02, mean=1.0)
        for name, rows in (("q", queries), ("k", keys), ("v", keys)):
            yield Planned(f"{base}.self_attn.{name}_proj.weight", (rows, shape.hidden), into)
        yield Planned(f"{base}.self_attn.o_proj.weight", (shape.hidden, queries), 1 / sqrt(queries) / onto)
        yield Planned(f"{base}.post_attention_layernorm.weight", (shape.hidden,), 0.02, mean=1.0)
        wide, narrow = (shape.width, shape.hidden), (shape.hidden, shape.width)
        if family == "mixtral":
            moe = f"{base}.block_sparse_moe"
            yield Planned(f"{moe}.gate.weight", (shape.experts, shape.hidden), 1.5 * into)
            names = [f"{moe}.experts.{expert}.w{{}}" for expert in range(shape.experts)]
            parts = [(name.format(part), part) for name in names for part in (1, 3, 2)]
        else:
            parts = [(f"{base}.mlp.{part}_proj", part) for part in ("gate", "up", "down")]  # type: ignore[misc]
        for name, part in parts:
            last = part in (2, "down")
            std = 2 / sqrt(shape.width) / onto if last else into
            yield Planned(f"{name}.weight", narrow if last else wide, std)
    yield Planned("model.norm.weight", (shape.hidden,), 0.02, mean=1.0)
    yield Planned("lm_head.weight", (shape.vocab, shape.hidden), 3 / sqrt(shape.hidden))


@dataclass
class Ran:
    """A run: tokens and logits by row, how long it took without loading, and what the engine says of it."""

    tokens: list[list[int]]
    logits: dict[int, torch.Tensor]
    seconds: float
    summary: RunSummary
    description: dict[str, str]
    bytes_copied: int = 0
    bytes_read: int = 0
    errors: dict[int, BaseException] = field(default_factory=dict)


class _Rows:
    """A RequestSource over token ids; every row generates exactly ``count`` tokens."""

    def __init__(self, prompts: Sequence[Sequence[int]], count: int) -> None:
        self.prompts = prompts
        self.params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
        self.tokens: list[list[int]] = [[] for _ in prompts]
        self.errors: dict[int, BaseException] = {}

    def __len__(self) -> int:
        return len(self.prompts)

    def size(self, index: int) -> RequestSize:
        return RequestSize(len(self.prompts[index]), self.params.max_tokens)

    def open(self, index: int) -> tuple[SequenceRequest, _Row]:
        return SequenceRequest(index, self.prompts[index], self.params, seed=0), _Row(self, index)

    def failed(self, index: int, error: BaseException) -> None:
        self.errors[index] = error


class _Row:
    def __init__(self, rows: _Rows, index: int) -> None:
        self.rows, self.index = rows, index

    def accept(self, token: SampledToken) -> Finish | None:
        self.rows.tokens[self.index].append(token.token)
        return None

    def done(self, finish: Finish) -> None: ...

    def failed(self, error: BaseException) -> None:
        self.rows.errors[self.index] = error


def run(
    model: Path, prompts: Sequence[Sequence[int]], count: int, options: EngineOptions, *, keep: Sequence[int] = ()
) -> Ran:
    """Generate ``count`` tokens for every prompt; ``keep``: rows whose logits are kept. Raises a row's failure."""
    kept: dict[int, list[torch.Tensor]] = {row: [] for row in keep}
    original = Sampler.sample

    def sample(self: Sampler, logits: torch.Tensor, rows: Sequence[Any]) -> list[SampledToken]:
        for line, row in zip(logits, rows, strict=True):
            if row.row in kept:
                kept[row.row].append(line.clone())
        return original(self, logits, rows)

    engine = build_engine(model, options)
    source = _Rows(prompts, count)
    try:
        with patch.object(Sampler, "sample", sample):
            began = time.monotonic()
            summary = asyncio.run(engine.run(source))
            seconds = time.monotonic() - began
        runner = engine._runner
        assert runner is not None
        statistics = runner.stream.statistics
        description = engine.describe()
        for error in source.errors.values():
            raise error
        logits = {row: torch.stack(lines) for row, lines in kept.items() if lines}
        return Ran(source.tokens, logits, seconds, summary, description, statistics.copied_bytes, statistics.bytes_read)
    finally:
        engine.close()


def prompts_of(lengths: Sequence[int], vocab: int, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, vocab, (length,), generator=generator).tolist() for length in lengths]
