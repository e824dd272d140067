"""Every matrix assembled from a checkpoint equals the weights of the transformers model that wrote it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from state_dict_roles import check_weights
from tiny_gguf import ARCHITECTURES, tiny_gguf
from tiny_models import FAMILIES, tiny_checkpoint

from batchgen_lite.models.load import load_model

_MOE = sorted(set(FAMILIES) - {"llama", "llama3", "mistral", "qwen2", "qwen3"})


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_as_published(family: str, tmp_path: Path) -> None:
    model = tiny_checkpoint(family, tmp_path, num_hidden_layers=2)
    check_weights(load_model(tmp_path), model)


@pytest.mark.parametrize("family", _MOE)
def test_experts_stacked_in_bf16_shards(family: str, tmp_path: Path) -> None:
    model = tiny_checkpoint(family, tmp_path, dtype="bfloat16", shards=3, experts="stacked", num_hidden_layers=2)
    loaded = load_model(tmp_path)
    assert len(loaded.checkpoint.files) == 3
    assert loaded.spec.dtype == "bfloat16"
    check_weights(loaded, model)


@pytest.mark.parametrize("family", ["llama", "qwen3", "glm4_moe", "deepseek_v3"])
def test_biases_where_the_config_says_so(family: str, tmp_path: Path) -> None:
    mlp = {"mlp_bias": True} if family == "llama" else {}
    model = tiny_checkpoint(family, tmp_path, attention_bias=True, num_hidden_layers=2, **mlp)
    check_weights(load_model(tmp_path), model)


@pytest.mark.parametrize("encoding", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "IQ4_NL", "MXFP4"])
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_gguf_encodings(family: str, encoding: str, tmp_path: Path) -> None:
    model = tiny_gguf(family, tmp_path / "tiny.gguf", encoding=encoding, num_hidden_layers=2)
    check_weights(load_model(tmp_path / "tiny.gguf"), model)


@pytest.mark.parametrize("encoding", ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"])
def test_gguf_k_quants(encoding: str, tmp_path: Path) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 8, "num_hidden_layers": 1}
    model = tiny_gguf("mixtral", tmp_path / "tiny.gguf", encoding=encoding, num_local_experts=3, **sizes)
    loaded = load_model(tmp_path / "tiny.gguf")
    assert loaded.weights.layers[0].experts[2].down.encoding == encoding
    check_weights(loaded, model)


@pytest.mark.parametrize("family", sorted(ARCHITECTURES))
def test_gguf_architectures(family: str, tmp_path: Path) -> None:
    model = tiny_gguf(family, tmp_path / "tiny.gguf", encoding="Q8_0", num_hidden_layers=2)
    check_weights(load_model(tmp_path / "tiny.gguf"), model)


def test_gguf_experts_packed_more_than_the_rest(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    model = tiny_gguf("gpt_oss", path, encoding="Q8_0", expert_encoding="MXFP4", num_hidden_layers=2)
    loaded = load_model(path)
    assert loaded.weights.layers[1].experts[0].gate_up.encoding == "MXFP4"
    assert loaded.weights.layers[1].attention.out.encoding == "Q8_0"
    check_weights(loaded, model)


def test_gguf_llama_with_attention_biases(tmp_path: Path) -> None:
    model = tiny_gguf("llama", tmp_path / "tiny.gguf", attention_bias=True, num_hidden_layers=1)
    loaded = load_model(tmp_path / "tiny.gguf")
    assert loaded.spec.layers[0].attention.qkv_bias
    assert loaded.spec.layers[0].attention.out_bias
    check_weights(loaded, model)


def test_gguf_latent_projection_stored_whole(tmp_path: Path) -> None:
    model = tiny_gguf("deepseek_v3", tmp_path / "tiny.gguf", split_kv_b=False, num_hidden_layers=2)
    check_weights(load_model(tmp_path / "tiny.gguf"), model)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_untied_and_tied_heads(family: str, tmp_path: Path) -> None:
    for tied in (False, True):
        model: Any = tiny_checkpoint(family, tmp_path / str(tied), tie_word_embeddings=tied, num_hidden_layers=1)
        loaded = load_model(tmp_path / str(tied))
        assert loaded.spec.tie_embeddings is tied
        assert (loaded.weights.head is loaded.weights.embedding) is tied
        assert torch.equal(model.lm_head.weight, model.model.embed_tokens.weight) is tied
        check_weights(loaded, model)
