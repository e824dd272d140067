"""Convert a Qwen3-MoE checkpoint (safetensors) to one GGUF file with the same weights, for rivals that read only that.

    python bench/to_gguf.py checkpoint/ model-f16.gguf

Matrices become float16: bfloat16 values fit but for those beyond 65504 (refused) and those below 6e-8 (zero). The
router and the norms become float32, as llama.cpp wants them. One tensor is in memory at a time.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open


@dataclass(frozen=True, slots=True)
class Converted:
    """One tensor of the GGUF file: its shape (outermost first), its type, and how to load it."""

    name: str
    shape: tuple[int, ...]
    dtype: type[np.float16] | type[np.float32]
    load: Callable[[], torch.Tensor]

    def array(self) -> NDArray[Any]:
        values = self.load().to(torch.float16 if self.dtype is np.float16 else torch.float32)
        if not values.isfinite().all():
            raise SystemExit(f"{self.name}: holds a value beyond 65504, the largest of float16, or none at all")
        return values.numpy()


class Weights:
    """Tensors of a checkpoint directory by name, whatever shard they are in."""

    def __init__(self, root: Path) -> None:
        index = root / "model.safetensors.index.json"
        if index.exists():
            files: dict[str, str] = json.loads(index.read_text())["weight_map"]
        else:
            with safe_open(root / "model.safetensors", framework="pt") as shard:
                files = dict.fromkeys(shard.keys(), "model.safetensors")
        # Opened once: each opening parses the shard's whole header.
        opened = {file: safe_open(root / file, framework="pt") for file in set(files.values())}
        self.shards = {name: opened[file] for name, file in files.items()}

    def __contains__(self, name: str) -> bool:
        return name in self.shards

    def load(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self.shards[name].get_tensor(name)  # type: ignore[no-untyped-call]
        return tensor

    def stacked(self, names: list[str]) -> torch.Tensor:
        return torch.stack([self.load(name) for name in names])


def head_size(config: dict[str, Any]) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def layer_tensors(config: dict[str, Any], weights: Weights, layer: int) -> Iterator[Converted]:
    """Tensors of one layer. Rotary pairs keep their order: this architecture has it in both formats."""
    here, there = f"blk.{layer}", f"model.layers.{layer}"
    hidden, head_dim = config["hidden_size"], head_size(config)
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    experts, width = config["num_experts"], config["moe_intermediate_size"]
    plain: dict[str, tuple[str, tuple[int, ...], type[np.float16] | type[np.float32]]] = {
        "attn_norm": ("input_layernorm", (hidden,), np.float32),
        "attn_q": ("self_attn.q_proj", (heads * head_dim, hidden), np.float16),
        "attn_q_norm": ("self_attn.q_norm", (head_dim,), np.float32),
        "attn_k": ("self_attn.k_proj", (kv_heads * head_dim, hidden), np.float16),
        "attn_k_norm": ("self_attn.k_norm", (head_dim,), np.float32),
        "attn_v": ("self_attn.v_proj", (kv_heads * head_dim, hidden), np.float16),
        "attn_output": ("self_attn.o_proj", (hidden, heads * head_dim), np.float16),
        "ffn_norm": ("post_attention_layernorm", (hidden,), np.float32),
        "ffn_gate_inp": ("mlp.gate", (experts, hidden), np.float32),
    }
    for short, (long, shape, dtype) in plain.items():
        source = f"{there}.{long}.weight"
        yield Converted(f"{here}.{short}.weight", shape, dtype, lambda source=source: weights.load(source))  # type: ignore[misc]
    for role, shape in (("gate", (width, hidden)), ("up", (width, hidden)), ("down", (hidden, width))):
        names = [f"{there}.mlp.experts.{expert}.{role}_proj.weight" for expert in range(experts)]
        yield Converted(
            f"{here}.ffn_{role}_exps.weight",
            (experts, *shape),
            np.float16,
            lambda names=names: weights.stacked(names),  # type: ignore[misc]
        )


def model_tensors(config: dict[str, Any], weights: Weights) -> Iterator[Converted]:
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    embedding, head = "model.embed_tokens.weight", "lm_head.weight"
    yield Converted("token_embd.weight", (vocab, hidden), np.float16, lambda: weights.load(embedding))
    yield Converted("output_norm.weight", (hidden,), np.float32, lambda: weights.load("model.norm.weight"))
    if head in weights:
        yield Converted("output.weight", (vocab, hidden), np.float16, lambda: weights.load(head))
    for layer in range(config["num_hidden_layers"]):
        yield from layer_tensors(config, weights, layer)


def add_metadata(writer: gguf.GGUFWriter, config: dict[str, Any], tokenizer: dict[str, Any]) -> None:
    """The keys that llama.cpp reads for this architecture, and a byte-level vocabulary."""
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head_size(config))
    writer.add_value_length(head_size(config))
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_expert_count(config["num_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)

    vocabulary: dict[str, int] = tokenizer["model"]["vocab"]
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    special = {token["content"] for token in tokenizer["added_tokens"]}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL if t in special else gguf.TokenType.NORMAL for t in tokens])
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in tokenizer["model"]["merges"]]
    # llama.cpp refuses a file without merges; jobs are given as token ids, so this one is never applied.
    writer.add_token_merges(merges or ["a a"])
    writer.add_eos_token_id(config["eos_token_id"])


def convert(source: Path, output: Path) -> int:
    """Write the GGUF file; returns the bytes of its tensors."""
    config: dict[str, Any] = json.loads((source / "config.json").read_text())
    if config.get("model_type") != "qwen3_moe":
        raise SystemExit(f'{source}: model_type "{config.get("model_type")}"; only "qwen3_moe" can be converted')
    tensors = list(model_tensors(config, Weights(source)))
    writer = gguf.GGUFWriter(output, "qwen3moe")
    add_metadata(writer, config, json.loads((source / "tokenizer.json").read_text()))
    total = 0
    for tensor in tensors:
        nbytes = int(np.prod(tensor.shape)) * np.dtype(tensor.dtype).itemsize
        writer.add_tensor_info(tensor.name, tensor.shape, np.dtype(tensor.dtype), nbytes)
        total += nbytes
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for tensor in tensors:
            writer.write_tensor_data(tensor.array())
    finally:
        writer.close()
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description="Convert a Qwen3-MoE checkpoint to GGUF (float16).")
    parser.add_argument("source", type=Path, help="directory with config.json and safetensors files")
    parser.add_argument("output", type=Path, help="the GGUF file to write")
    args = parser.parse_args()
    began = time.monotonic()
    total = convert(args.source, args.output)
    print(f"{args.output}: {total / 1e9:.2f} GB in {time.monotonic() - began:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
