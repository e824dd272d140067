"""GGUF metadata to ModelSpec: the same model as its config.json describes, and refusals by key."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from state_dict_roles import check_weights
from tiny_gguf import ARCHITECTURES, tiny_gguf

from batchgen_lite.errors import CheckpointError, ModelError, UnsupportedError
from batchgen_lite.models.load import load_model
from batchgen_lite.models.rope import rope_tables
from batchgen_lite.models.spec import LayerSpec, ModelSpec
from batchgen_lite.models.spec_from_config import spec_from_config

_POSITIONS = torch.arange(0, 512, 7)


def _normalised(layer: LayerSpec) -> LayerSpec:
    """Without what two descriptions of one model may write differently: rope parameters and fp32 rounding."""
    attention = replace(
        layer.attention,
        rope=None,
        scale=round(layer.attention.scale, 6),
        latent_norm_eps=0.0,
        num_kv_heads=1 if layer.attention.is_mla else layer.attention.num_kv_heads,
    )
    router = layer.router and replace(layer.router, scaling=round(layer.router.scaling, 6))
    return replace(layer, attention=attention, router=router)


def _same(ours: ModelSpec, config: Any) -> None:
    theirs = spec_from_config({**config.to_dict(), "dtype": "float32"})
    assert [_normalised(layer) for layer in ours.layers] == [_normalised(layer) for layer in theirs.layers]
    for name in ("hidden_size", "vocab_size", "max_positions", "dtype", "tie_embeddings", "eos_ids", "bos_id"):
        assert getattr(ours, name) == getattr(theirs, name), name
    assert ours.norm_eps == pytest.approx(theirs.norm_eps, rel=1e-6)
    for layer, other in zip(ours.layers, theirs.layers, strict=True):
        assert layer.attention.rope is not None
        assert other.attention.rope is not None
        assert layer.attention.rope.interleaved == other.attention.rope.interleaved
        for table, expected in zip(
            rope_tables(layer.attention.rope, _POSITIONS), rope_tables(other.attention.rope, _POSITIONS), strict=True
        ):
            torch.testing.assert_close(table, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("family", sorted(ARCHITECTURES))
def test_the_model_that_its_config_describes(family: str, tmp_path: Path) -> None:
    model = tiny_gguf(family, tmp_path / "tiny.gguf", num_hidden_layers=2)
    spec = load_model(tmp_path / "tiny.gguf").spec
    assert spec.architecture == ARCHITECTURES[family]
    _same(spec, model.config)


def test_older_files_without_widths_and_vocabulary_size(tmp_path: Path) -> None:
    left_out = dict.fromkeys(("qwen3moe.attention.value_length", "qwen3moe.rope.dimension_count"), ...)
    model = tiny_gguf("qwen3_moe", tmp_path / "tiny.gguf", num_hidden_layers=1, metadata=left_out)
    loaded = load_model(tmp_path / "tiny.gguf")
    _same(loaded.spec, model.config)
    check_weights(loaded, model)


def test_qwen2_moe_without_expert_widths(tmp_path: Path) -> None:
    keys = ("expert_feed_forward_length", "expert_shared_feed_forward_length")
    tiny_gguf(
        "qwen2_moe",
        tmp_path / "tiny.gguf",
        num_hidden_layers=1,
        intermediate_size=128,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=128,
        metadata={f"qwen2moe.{key}": ... for key in keys},
    )
    layer = load_model(tmp_path / "tiny.gguf").spec.layers[0]
    assert layer.expert is not None
    assert layer.shared is not None
    assert (layer.expert.intermediate, layer.shared.intermediate) == (32, 128)


def test_stop_tokens_of_the_tokenizer(tmp_path: Path) -> None:
    more = {"tokenizer.ggml.eot_token_id": 5, "tokenizer.ggml.eom_token_id": 6}
    tiny_gguf("llama", tmp_path / "tiny.gguf", num_hidden_layers=1, metadata=more)
    assert load_model(tmp_path / "tiny.gguf").spec.eos_ids == {2, 5, 6}


def test_linear_rope_scaling(tmp_path: Path) -> None:
    scaling = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    tiny_gguf("llama", tmp_path / "tiny.gguf", num_hidden_layers=1, metadata=scaling)
    rope = load_model(tmp_path / "tiny.gguf").spec.layers[0].attention.rope
    assert rope is not None
    assert (rope.kind, rope.factor) == ("linear", 4.0)


def test_quantised_files_count_as_float16(tmp_path: Path) -> None:
    tiny_gguf("llama", tmp_path / "tiny.gguf", encoding="Q8_0", num_hidden_layers=1)
    assert load_model(tmp_path / "tiny.gguf").spec.dtype == "float16"


_REFUSED: list[tuple[str, dict[str, Any], type[ModelError], str]] = [
    ("llama", {"llama.rope.scaling.type": "longrope"}, UnsupportedError, "longrope"),
    ("llama", {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 2.0,
               "llama.rope.scaling.attn_factor": 0.5}, UnsupportedError, "attn_factor"),
    ("llama", {"llama.logit_scale": 0.5}, UnsupportedError, "logit_scale"),
    ("llama", {"llama.rope.freq_base_swa": 5000.0}, UnsupportedError, "freq_base_swa"),
    ("qwen3_moe", {"qwen3moe.expert_group_scale": 0.5}, UnsupportedError, "expert_group_scale"),
    ("llama", {"llama.attention.clamp_kqv": 8.0}, UnsupportedError, "clamp_kqv"),
    ("llama", {"llama.attention.sliding_window": 32}, UnsupportedError, "sliding_window = 32"),
    ("llama", {"llama.rope.dimension_count": 16}, UnsupportedError, "16 of 32"),
    ("llama", {"llama.rope.dimension_count": 64}, CheckpointError, "at most 32"),
    ("llama", {"llama.block_count": ...}, CheckpointError, "block_count"),
    ("llama", {"llama.attention.head_count_kv": [1, 2]}, CheckpointError, "head_count_kv"),
    ("llama", {"llama.attention.head_count_kv": 4}, CheckpointError, "evenly"),
    ("mixtral", {"llama.expert_used_count": 9}, CheckpointError, "9.*8 experts"),
    ("qwen3_moe", {"qwen3moe.expert_count": ...}, CheckpointError, "expert_count"),
    ("qwen3_moe", {"qwen3moe.expert_gating_func": 4}, UnsupportedError, "expert_gating_func = 4"),
    ("deepseek_v2", {"deepseek2.attention.kv_lora_rank": ...}, CheckpointError, "kv_lora_rank"),
]  # fmt: skip


@pytest.mark.parametrize(("family", "changes", "error", "match"), _REFUSED)
def test_refusals(family: str, changes: dict[str, Any], error: type[ModelError], match: str, tmp_path: Path) -> None:
    tiny_gguf(family, tmp_path / "tiny.gguf", num_hidden_layers=1, metadata=changes)
    with pytest.raises(error, match=match):
        load_model(tmp_path / "tiny.gguf")


def test_unknown_architecture(tmp_path: Path) -> None:
    import gguf

    writer = gguf.GGUFWriter(tmp_path / "tiny.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UnsupportedError, match=r"'mamba' is not implemented; supported: .*qwen3moe"):
        load_model(tmp_path / "tiny.gguf")
