"""Quantised checkpoints become matrices equal to the dequantised model; stray and missing parts are refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from plain_decoder import PlainDecoder
from state_dict_roles import check_weights
from tiny_quantised import tiny_quantised

from batchgen_lite.errors import CheckpointError, ModelError, UnsupportedError
from batchgen_lite.models.load import load_model

_HEADS = {"head_dim": 32}


@pytest.mark.parametrize(
    ("family", "scheme", "overrides"),
    [
        ("qwen3_moe", "fp8", _HEADS),
        ("deepseek_v3", "fp8", {}),
        ("llama", "fp8", {"attention_bias": True}),
        ("qwen3", "gptq", _HEADS),
        ("mixtral", "gptq", _HEADS),
        ("qwen2", "awq", {}),
        ("qwen3_moe", "awq", _HEADS),
        ("llama", "compressed", _HEADS),
        ("qwen3_moe", "compressed", _HEADS),
        ("gpt_oss", "mxfp4", _HEADS),
    ],
)
def test_equals_the_dequantised_model(family: str, scheme: str, overrides: dict[str, Any], tmp_path: Path) -> None:
    model = tiny_quantised(family, scheme, tmp_path, **overrides)
    loaded = load_model(tmp_path)
    check_weights(loaded, model)
    layer = loaded.weights.layers[-1]
    ffn = layer.dense or layer.experts[0]
    assert ffn.down.encoding not in ("F32", "F16", "BF16")  # kept packed
    assert loaded.weights.embedding.encoding == "F32"


def test_logits_of_gpt_oss_in_mxfp4(tmp_path: Path) -> None:
    model = tiny_quantised("gpt_oss", "mxfp4", tmp_path, **_HEADS)
    ids = torch.arange(3, 83)
    with torch.no_grad():
        expected = model(ids[None]).logits[0]
        assert (PlainDecoder(load_model(tmp_path)).logits(ids) - expected).abs().max() <= 1e-4


def test_zero_biases_beside_quantised_weights_are_passed_over(tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.q_proj.bias"
    model = tiny_quantised(
        "llama", "gptq", tmp_path, edit=lambda tensors: tensors.update({name: torch.zeros(192)}), **_HEADS
    )
    check_weights(load_model(tmp_path), model)


_Q = "model.layers.0.self_attn.q_proj"
_DOWN = "model.layers.1.mlp.down_proj"


@pytest.mark.parametrize(
    ("scheme", "edit", "error", "match"),
    [
        ("gptq", lambda t: t.update({f"{_Q}.bias": torch.ones(192)}), CheckpointError, "no place for .*q_proj.bias"),
        ("gptq", lambda t: t.pop(f"{_Q}.qzeros"), CheckpointError, "q_proj.qzeros"),
        ("awq", lambda t: t.pop(f"{_Q}.qweight"), CheckpointError, "q_proj"),
        ("fp8", lambda t: t.pop(f"{_DOWN}.weight_scale_inv"), ModelError, "down_proj.weight.* F8_E4M3"),
        ("fp8", lambda t: t.pop(f"{_DOWN}.weight"), CheckpointError, "down_proj"),
        ("fp8", lambda t: t.update({"model.layers.0.mlp.extra_scale_inv": torch.ones(1)}), CheckpointError, "extra"),
        ("compressed", lambda t: t.pop(f"{_Q}.weight_scale"), CheckpointError, "q_proj.weight_scale"),
    ],
)
def test_parts_that_do_not_add_up(
    scheme: str, edit: Callable[[Any], Any], error: type[ModelError], match: str, tmp_path: Path
) -> None:
    tiny_quantised("llama", scheme, tmp_path, edit=edit, **_HEADS)
    with pytest.raises(error, match=match):
        load_model(tmp_path)


@pytest.mark.parametrize(
    ("scheme", "quantization", "match"),
    [
        ("gptq", {"quant_method": "bitsandbytes"}, "bitsandbytes"),
        ("gptq", {"bits": 3}, "bits"),
        ("awq", {"version": "gemv"}, "gemv"),
        ("fp8", {"activation_scheme": "static"}, "static"),
    ],
)
def test_unknown_schemes(scheme: str, quantization: dict[str, Any], match: str, tmp_path: Path) -> None:
    tiny_quantised("llama", scheme, tmp_path, quantization=quantization, **_HEADS)
    with pytest.raises(UnsupportedError, match=match):
        load_model(tmp_path)
