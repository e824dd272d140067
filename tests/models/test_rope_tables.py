"""Rotary tables are bitwise those of transformers, for every kind and family."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_models import FAMILIES, tiny_config

from batchgen_lite.errors import UnsupportedError
from batchgen_lite.models.rope import rope_frequencies, rope_tables
from batchgen_lite.models.spec import RopeSpec
from batchgen_lite.models.spec_from_config import spec_from_config

_POSITIONS = torch.tensor([0, 1, 2, 3, 63, 64, 65, 127, 511, 4095, 4096, 100_000, 131_071])

_KINDS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 500000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 1000000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 32768,
    },
    "yarn, given attention factor and betas": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 16.0,
        "original_max_position_embeddings": 4096,
        "attention_factor": 1.25,
        "beta_fast": 24.0,
        "beta_slow": 2.0,
    },
    "yarn, two mscales": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 40.0,
        "original_max_position_embeddings": 4096,
        "mscale": 1.0,
        "mscale_all_dim": 0.707,
    },
    "yarn, one mscale": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 40.0,
        "original_max_position_embeddings": 4096,
        "mscale": 0.707,
    },
    "yarn, not truncated": {
        "rope_type": "yarn",
        "rope_theta": 150000.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "truncate": False,
    },
    "yarn, factor below 1": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 0.5,
        "original_max_position_embeddings": 4096,
    },
}


def _expected(config: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin [T, dim / 2] of transformers' own rotary embedding."""
    from transformers import AutoModelForCausalLM

    rotary = AutoModelForCausalLM.from_config(config).model.rotary_emb
    tables = rotary(torch.zeros(1, dtype=torch.float32), _POSITIONS[None])
    if isinstance(tables, torch.Tensor):  # DeepSeek-V2: complex numbers
        return tables[0].real, tables[0].imag
    half = rotary.inv_freq.shape[0]
    return tables[0][0, :, :half], tables[1][0, :, :half]


def _compare(config: Any, layer: int = 0) -> RopeSpec:
    spec = spec_from_config({**config.to_dict(), "dtype": "float32"}).layers[layer].attention.rope
    assert spec is not None
    cos, sin = rope_tables(spec, _POSITIONS)
    expected_cos, expected_sin = _expected(config)
    assert cos.dtype == sin.dtype == torch.float32
    if config.model_type == "deepseek_v2":
        # torch.polar computes in another way than cos and sin: equal up to the last bit.
        torch.testing.assert_close(cos, expected_cos, rtol=0, atol=2e-7)
        torch.testing.assert_close(sin, expected_sin, rtol=0, atol=2e-7)
    else:
        assert torch.equal(cos, expected_cos)
        assert torch.equal(sin, expected_sin)
    return spec


@pytest.mark.parametrize("kind", sorted(_KINDS))
@pytest.mark.parametrize("head_dim", [20, 64, 128])
def test_kinds(kind: str, head_dim: int) -> None:
    config = tiny_config("llama", head_dim=head_dim, rope_parameters=dict(_KINDS[kind]), num_hidden_layers=1)
    assert _compare(config).kind == _KINDS[kind]["rope_type"]


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_families(family: str) -> None:
    _compare(tiny_config(family, num_hidden_layers=1))


def test_partial_rotary_counts_the_first_channels() -> None:
    config = tiny_config("glm4_moe", head_dim=24, num_hidden_layers=1)
    assert _compare(config).dim == 12


def test_frequency_factors_divide() -> None:
    plain, scaling = rope_frequencies(RopeSpec(theta=10000.0, dim=8))
    divided, _ = rope_frequencies(RopeSpec(theta=10000.0, dim=8, freq_factors=(1.0, 2.0, 4.0, 8.0)))
    assert scaling == 1.0
    assert torch.equal(divided, plain / torch.tensor([1.0, 2.0, 4.0, 8.0]))


def test_unknown_kind() -> None:
    with pytest.raises(UnsupportedError, match="longrope"):
        rope_frequencies(RopeSpec(theta=10000.0, dim=8, kind="longrope"))
