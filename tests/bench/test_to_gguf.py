"""The GGUF copy of a measured checkpoint holds the same weights under the names that llama.cpp knows."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from make_checkpoint import Shape, write_checkpoint
from safetensors.torch import load_file, save_file
from to_gguf import convert

TINY = Shape(layers=2, hidden=32, heads=4, kv_heads=2, head_dim=16, experts=4, top_k=2, width=24, vocab=400)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source")
    write_checkpoint(folder, TINY, shard_bytes=60_000)
    return folder


@pytest.fixture(scope="module")
def reader(checkpoint: Path) -> gguf.GGUFReader:
    convert(checkpoint, checkpoint / "model.gguf")
    return gguf.GGUFReader(checkpoint / "model.gguf")


def stored(reader: gguf.GGUFReader, name: str) -> torch.Tensor:
    (tensor,) = [tensor for tensor in reader.tensors if tensor.name == name]
    return torch.tensor(np.array(tensor.data)).float()


def original(checkpoint: Path) -> dict[str, torch.Tensor]:
    return {
        name: tensor.float()
        for shard in sorted(checkpoint.glob("*.safetensors"))
        for name, tensor in load_file(shard).items()
    }


def test_names_are_those_of_the_architecture(reader: gguf.GGUFReader) -> None:
    known = {gguf.TENSOR_NAMES[kind] for kind in gguf.MODEL_TENSORS[gguf.MODEL_ARCH.QWEN3MOE]}
    expected = {f"{name.format(bid=layer)}.weight" for name in known for layer in range(TINY.layers)}
    assert {tensor.name for tensor in reader.tensors} == expected


def test_values_are_the_same(checkpoint: Path, reader: gguf.GGUFReader) -> None:
    source = original(checkpoint)
    pairs = {
        "token_embd": "model.embed_tokens",
        "output": "lm_head",
        "blk.1.attn_q": "model.layers.1.self_attn.q_proj",
        "blk.1.attn_k_norm": "model.layers.1.self_attn.k_norm",
        "blk.0.ffn_gate_inp": "model.layers.0.mlp.gate",
    }
    for ours, theirs in pairs.items():
        # bfloat16 has fewer digits than float16, so only the very small can change.
        torch.testing.assert_close(stored(reader, f"{ours}.weight"), source[f"{theirs}.weight"], rtol=0, atol=6e-8)
    for role in ("gate", "up", "down"):
        experts = [source[f"model.layers.1.mlp.experts.{expert}.{role}_proj.weight"] for expert in range(TINY.experts)]
        torch.testing.assert_close(
            stored(reader, f"blk.1.ffn_{role}_exps.weight"), torch.stack(experts), rtol=0, atol=6e-8
        )


def test_metadata(reader: gguf.GGUFReader) -> None:
    def value(key: str) -> object:
        field = reader.get_field(key)
        assert field is not None, key
        return field.contents()

    assert value("general.architecture") == "qwen3moe"
    assert value("qwen3moe.expert_count") == TINY.experts
    assert value("qwen3moe.expert_used_count") == TINY.top_k
    assert value("qwen3moe.attention.key_length") == TINY.head_dim
    assert value("qwen3moe.rope.freq_base") == 1e6
    assert len(value("tokenizer.ggml.tokens")) == TINY.vocab  # type: ignore[arg-type]
    assert value("tokenizer.ggml.merges")


def test_other_models_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(SystemExit, match='"llama"'):
        convert(tmp_path, tmp_path / "model.gguf")


def test_values_beyond_float16_are_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, replace(TINY, layers=1))
    (shard,) = tmp_path.glob("*.safetensors")
    tensors = load_file(shard)
    tensors["lm_head.weight"][0, 0] = 1e6
    save_file(tensors, shard, metadata={"format": "pt"})
    with pytest.raises(SystemExit, match=r"output\.weight.*65504"):
        convert(tmp_path, tmp_path / "model.gguf")
