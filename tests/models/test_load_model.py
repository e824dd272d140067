"""load_model refuses what does not fit, by name, and takes the harmless variations that writers produce."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from state_dict_roles import check_weights
from tiny_models import change_json, tiny_checkpoint, write_safetensors

from batchgen_lite.errors import CheckpointError, UnsupportedError
from batchgen_lite.models.load import load_model

Tensors = dict[str, torch.Tensor]


def _edited(family: str, path: Path, edit: Callable[[Tensors], Any], **options: Any) -> Any:
    """A tiny checkpoint whose tensors ``edit`` has changed in place; returns the model before the change."""
    model = tiny_checkpoint(family, path, num_hidden_layers=2, **options)
    tensors = load_file(path / "model.safetensors")
    edit(tensors)
    write_safetensors(path, tensors)
    return model


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("llama", "model.embed_tokens.weight"),
        ("llama", "lm_head.weight"),
        ("llama", "model.norm.weight"),
        ("llama", "model.layers.1.mlp.up_proj.weight"),
        ("qwen2", "model.layers.0.self_attn.k_proj.bias"),
        ("qwen3", "model.layers.1.self_attn.q_norm.weight"),
        ("mixtral", "model.layers.1.block_sparse_moe.gate.weight"),
        ("mixtral", "model.layers.1.block_sparse_moe.experts.7.w3.weight"),
        ("qwen2_moe", "model.layers.1.mlp.shared_expert_gate.weight"),
        ("gpt_oss", "model.layers.1.self_attn.sinks"),
        ("gpt_oss", "model.layers.0.mlp.experts.down_proj_bias"),
        ("deepseek_v3", "model.layers.1.mlp.gate.e_score_correction_bias"),
        ("deepseek_v3", "model.layers.0.self_attn.kv_a_layernorm.weight"),
    ],
)
def test_missing_tensor(family: str, name: str, tmp_path: Path) -> None:
    _edited(family, tmp_path, lambda tensors: tensors.pop(name))
    with pytest.raises(CheckpointError, match=f"{name.replace('.', '[.]')}.* is missing"):
        load_model(tmp_path)


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("llama", "model.layers.0.self_attn.q_proj.bias"),
        ("llama", "model.layers.2.self_attn.q_proj.weight"),
        ("llama", "vision_tower.patch_embed.weight"),
        ("mixtral", "model.layers.1.block_sparse_moe.experts.8.w1.weight"),
        ("mixtral", "model.layers.1.mlp.gate.weight"),
        ("qwen3_moe", "model.layers.1.mlp.gate.e_score_correction_bias"),
        ("deepseek_v3", "model.layers.2.input_layernorm.weight"),
    ],
)
def test_tensor_without_a_role(family: str, name: str, tmp_path: Path) -> None:
    def add(tensors: Tensors) -> None:
        tensors[name] = torch.zeros(24, 72) if name.endswith("gate.weight") else torch.zeros(24)

    _edited(family, tmp_path, add)
    # With two spellings of one role either may be the one left over.
    left_over = "gate.weight" if name.endswith("gate.weight") else name
    with pytest.raises(CheckpointError, match=f"no place for .*{left_over.replace('.', '[.]')}|has shape"):
        load_model(tmp_path)


@pytest.mark.parametrize(
    ("family", "name", "shape"),
    [
        ("llama", "model.layers.0.self_attn.q_proj.weight", (72, 72)),
        ("llama", "model.norm.weight", (71,)),
        ("llama", "model.embed_tokens.weight", (210, 72)),
        ("mixtral", "model.layers.0.block_sparse_moe.experts.0.w2.weight", (88, 72)),
        ("mixtral", "model.layers.0.block_sparse_moe.gate.weight", (9, 72)),
    ],
)
def test_wrong_shape(family: str, name: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    _edited(family, tmp_path, lambda tensors: tensors.update({name: torch.zeros(shape)}))
    with pytest.raises(CheckpointError, match=f"{name.replace('.', '[.]')}.*{shape[0]}.*calls for"):
        load_model(tmp_path)


def test_stacked_experts_of_another_count(tmp_path: Path) -> None:
    tiny_checkpoint("qwen3_moe", tmp_path, experts="stacked", num_hidden_layers=1, config_changes={"num_experts": 25})
    with pytest.raises(CheckpointError, match="25"):
        load_model(tmp_path)


def test_a_storage_type_that_is_not_implemented(tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.o_proj.weight"
    _edited("llama", tmp_path, lambda tensors: tensors.update({name: tensors[name].to(torch.float64)}))
    with pytest.raises((UnsupportedError, CheckpointError), match="F64"):
        load_model(tmp_path)


def test_rotary_buffers_of_old_writers_are_passed_over(tmp_path: Path) -> None:
    def add(tensors: Tensors) -> None:
        for layer in range(2):
            tensors[f"model.layers.{layer}.self_attn.rotary_emb.inv_freq"] = torch.ones(10)

    model = _edited("llama", tmp_path, add)
    check_weights(load_model(tmp_path), model)


def test_multi_token_prediction_layers_are_passed_over(tmp_path: Path) -> None:
    def add(tensors: Tensors) -> None:
        for name in ("eh_proj.weight", "enorm.weight", "hnorm.weight", "mlp.experts.0.gate_proj.weight"):
            tensors[f"model.layers.2.{name}"] = torch.zeros(4, 4)

    model = _edited("deepseek_v3", tmp_path, add)
    check_weights(load_model(tmp_path), model)


class TestHeads:
    """tie_word_embeddings against what is stored; as transformers 5, a stored weight is never replaced."""

    def test_tied_with_an_own_head_stored(self, tmp_path: Path) -> None:
        head = torch.randn(211, 72, generator=torch.Generator().manual_seed(5))

        def add(tensors: Tensors) -> None:
            tensors["lm_head.weight"] = head

        model = _edited("qwen3", tmp_path, add)
        model.lm_head.weight = torch.nn.Parameter(head)
        check_weights(load_model(tmp_path), model)

    def test_tied_with_only_the_head_stored(self, tmp_path: Path) -> None:
        def rename(tensors: Tensors) -> None:
            tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")

        model = _edited("qwen3", tmp_path, rename)
        loaded = load_model(tmp_path)
        assert loaded.weights.head is loaded.weights.embedding
        check_weights(loaded, model)

    def test_the_config_may_leave_tying_out(self, tmp_path: Path) -> None:
        model = tiny_checkpoint("llama", tmp_path, num_hidden_layers=1, config_changes={"tie_word_embeddings": ...})
        check_weights(load_model(tmp_path), model)


class TestGenerationConfig:
    def test_stop_tokens_are_united(self, tmp_path: Path) -> None:
        tiny_checkpoint("llama", tmp_path, num_hidden_layers=1)
        change_json(tmp_path / "generation_config.json", {"eos_token_id": [7, 9], "temperature": 0.6})
        loaded = load_model(tmp_path)
        assert loaded.spec.eos_ids == {2, 7, 9}
        assert loaded.generation_config["temperature"] == 0.6

    def test_the_file_may_be_missing(self, tmp_path: Path) -> None:
        tiny_checkpoint("llama", tmp_path, num_hidden_layers=1)
        (tmp_path / "generation_config.json").unlink()
        assert load_model(tmp_path).generation_config == {}

    @pytest.mark.parametrize("content", ["[1]", "{", "\ud800", "[" * 100_000, " " * (2 << 20)])
    def test_a_damaged_file_is_refused(self, content: str, tmp_path: Path) -> None:
        tiny_checkpoint("llama", tmp_path, num_hidden_layers=1)
        (tmp_path / "generation_config.json").write_bytes(content.encode("utf-8", "surrogatepass"))
        with pytest.raises(CheckpointError, match="generation_config"):
            load_model(tmp_path)


def test_dtype_of_the_weights_where_the_config_states_none(tmp_path: Path) -> None:
    tiny_checkpoint(
        "llama", tmp_path, dtype="float16", num_hidden_layers=1, config_changes={"dtype": ..., "torch_dtype": ...}
    )
    assert "dtype" not in json.loads((tmp_path / "config.json").read_text())
    assert load_model(tmp_path).spec.dtype == "float16"
