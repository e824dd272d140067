"""Write a Qwen3-MoE-shaped checkpoint with random weights, for measurements; the default is 3.4 GB in bfloat16.

    python bench/make_checkpoint.py OUT [--layers 16 --experts 64 ...] [--prompts prompts.jsonl]

Nothing but one tensor is held in memory. Weights are normal with variance 1 / fan-in, those that write to the
residual stream smaller by sqrt(2 * layers), so activations keep their size through any number of layers; router
logits have a standard deviation of about ``--router-spread``, so the choice of experts differs from token to token
and all experts are used. What the model says has no meaning. The same flags give the same bytes.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from math import sqrt
from pathlib import Path

import torch
from safetensors_stream import Planned, split_into_shards, write_shard
from tiny_tokenizer import END_OF_TURN, SPECIALS, write_tokenizer
from workloads import WORKLOADS, write_prompts


@dataclass(frozen=True, slots=True)
class Shape:
    """The numbers that make a Qwen3-MoE model."""

    layers: int = 16
    hidden: int = 1024
    heads: int = 16
    kv_heads: int = 4
    head_dim: int = 64
    experts: int = 64
    top_k: int = 8
    width: int = 512  # of an expert
    vocab: int = 32000
    positions: int = 32768

    def config(self, dtype: str) -> dict[str, object]:
        """``config.json`` with the keys of Qwen3-MoE."""
        return {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "attention_bias": False,
            "hidden_act": "silu",
            "intermediate_size": self.width * self.top_k,
            "moe_intermediate_size": self.width,
            "num_experts": self.experts,
            "num_experts_per_tok": self.top_k,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "max_position_embeddings": self.positions,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1000000.0,
            "tie_word_embeddings": False,
            "vocab_size": self.vocab,
            "bos_token_id": None,
            "eos_token_id": SPECIALS.index(END_OF_TURN),
            "torch_dtype": dtype,
        }


def plan_layer(shape: Shape, layer: int, router_spread: float) -> Iterator[Planned]:
    """The tensors of one layer, in the order in which a sweep wants them."""
    base = f"model.layers.{layer}"
    into = 1 / sqrt(shape.hidden)
    onto_residual = sqrt(2 * shape.layers)
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    yield Planned(f"{base}.input_layernorm.weight", (shape.hidden,), 0.02, mean=1.0)
    yield Planned(f"{base}.self_attn.q_proj.weight", (queries, shape.hidden), into)
    yield Planned(f"{base}.self_attn.k_proj.weight", (keys, shape.hidden), into)
    yield Planned(f"{base}.self_attn.v_proj.weight", (keys, shape.hidden), into)
    yield Planned(f"{base}.self_attn.q_norm.weight", (shape.head_dim,), 0.02, mean=1.0)
    yield Planned(f"{base}.self_attn.k_norm.weight", (shape.head_dim,), 0.02, mean=1.0)
    yield Planned(f"{base}.self_attn.o_proj.weight", (shape.hidden, queries), 1 / sqrt(queries) / onto_residual)
    yield Planned(f"{base}.post_attention_layernorm.weight", (shape.hidden,), 0.02, mean=1.0)
    yield Planned(f"{base}.mlp.gate.weight", (shape.experts, shape.hidden), router_spread * into)
    for expert in range(shape.experts):
        name = f"{base}.mlp.experts.{expert}"
        yield Planned(f"{name}.gate_proj.weight", (shape.width, shape.hidden), into)
        yield Planned(f"{name}.up_proj.weight", (shape.width, shape.hidden), into)
        yield Planned(f"{name}.down_proj.weight", (shape.hidden, shape.width), 2 / sqrt(shape.width) / onto_residual)


def plan_model(shape: Shape, router_spread: float) -> Iterator[Planned]:
    """All tensors of the model, from the embedding to the head."""
    yield Planned("model.embed_tokens.weight", (shape.vocab, shape.hidden), 1.0)
    for layer in range(shape.layers):
        yield from plan_layer(shape, layer, router_spread)
    yield Planned("model.norm.weight", (shape.hidden,), 0.02, mean=1.0)
    yield Planned("lm_head.weight", (shape.vocab, shape.hidden), 3 / sqrt(shape.hidden))


def write_weights(output: Path, tensors: list[Planned], dtype: torch.dtype, shard_bytes: int, seed: int) -> int:
    """Write all shards and their index; returns the bytes of all tensors."""
    generator = torch.Generator().manual_seed(seed)

    def make(planned: Planned) -> torch.Tensor:
        return torch.empty(planned.shape).normal_(planned.mean, planned.std, generator=generator).to(dtype)

    shards = split_into_shards(tensors, dtype, shard_bytes)
    places: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        write_shard(output / file, shard, dtype, make)
        places.update({tensor.name: file for tensor in shard})
        print(f"  {file}: {len(shard)} tensors", file=sys.stderr)
    total = sum(tensor.nbytes(dtype) for tensor in tensors)
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (output / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    return total


def write_checkpoint(
    output: Path,
    shape: Shape,
    *,
    dtype: str = "bfloat16",
    shard_bytes: int = 1 << 30,
    router_spread: float = 1.5,
    seed: int = 0,
) -> int:
    """Write the whole directory, ``config.json`` last; returns the bytes of all tensors."""
    output.mkdir(parents=True, exist_ok=True)
    tensors = list(plan_model(shape, router_spread))
    total = write_weights(output, tensors, getattr(torch, dtype), shard_bytes, seed)
    write_tokenizer(output, shape.vocab)
    (output / "config.json").write_text(json.dumps(shape.config(dtype), indent=2) + "\n")
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a random Qwen3-MoE-shaped checkpoint.")
    parser.add_argument("output", type=Path, help="directory to write")
    for name in Shape.__dataclass_fields__:
        default = getattr(Shape(), name)
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default, help=f"default {default}")
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    parser.add_argument("--shard-bytes", type=int, default=1 << 30, help="largest shard (default 1 GiB)")
    parser.add_argument("--router-spread", type=float, default=1.5, help="std of router logits (default 1.5)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--prompts", type=Path, help="also write a file of prompts (token ids)")
    parser.add_argument("--workload", choices=sorted(WORKLOADS), default="uniform", help="which prompts")
    args = parser.parse_args()

    began = time.monotonic()
    shape = Shape(**{name: getattr(args, name) for name in Shape.__dataclass_fields__})
    total = write_checkpoint(
        args.output,
        shape,
        dtype=args.dtype,
        shard_bytes=args.shard_bytes,
        router_spread=args.router_spread,
        seed=args.seed,
    )
    print(f"{args.output}: {total / 1e9:.2f} GB in {time.monotonic() - began:.0f} s", file=sys.stderr)
    if args.prompts is not None:
        count = write_prompts(args.prompts, WORKLOADS[args.workload], shape.vocab)
        print(f"{args.prompts}: {count} prompts ({args.workload})", file=sys.stderr)


if __name__ == "__main__":
    main()
