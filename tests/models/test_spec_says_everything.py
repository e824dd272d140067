"""A blackboard decoder that knows only the spec and the weights gives transformers' logits, for every family."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from plain_decoder import PlainDecoder
from tiny_gguf import ARCHITECTURES, tiny_gguf
from tiny_models import FAMILIES, tiny_checkpoint

from batchgen_lite.models.load import load_model

# Longer than every window, and than the original context of the YaRN and Llama 3 configurations (64).
_TOKENS = 100


def _compare(path: Path, model: Any) -> None:
    ids = torch.randint(3, model.config.vocab_size, (_TOKENS,), generator=torch.Generator().manual_seed(9))
    with torch.no_grad():
        expected = model(ids[None]).logits[0]
        difference = (PlainDecoder(load_model(path)).logits(ids) - expected).abs().max().item()
    assert expected.std() > 0.5  # not degenerate: the comparison means something
    assert difference <= 1e-4


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_directories(family: str, tmp_path: Path) -> None:
    _compare(tmp_path, tiny_checkpoint(family, tmp_path, dtype="bfloat16", num_hidden_layers=2))


@pytest.mark.parametrize("family", sorted(ARCHITECTURES))
def test_gguf(family: str, tmp_path: Path) -> None:
    _compare(tmp_path / "tiny.gguf", tiny_gguf(family, tmp_path / "tiny.gguf", encoding="Q8_0", num_hidden_layers=2))


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("llama", {"attention_bias": True, "mlp_bias": True, "hidden_act": "gelu"}),
        ("llama", {"hidden_act": "gelu_pytorch_tanh"}),
        ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0}}),
        ("qwen3_moe", {"norm_topk_prob": False, "decoder_sparse_step": 2, "attention_bias": True}),
        ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 31, "num_key_value_heads": 1}),
        ("deepseek_v3", {"q_lora_rank": None, "rope_interleave": False, "attention_bias": True}),
        ("deepseek_v2", {"q_lora_rank": 30, "topk_method": "greedy"}),
        ("glm4_moe", {"use_qk_norm": False, "attention_bias": False, "n_group": 2, "topk_group": 1}),
        ("glm4_moe_lite", {"q_lora_rank": None, "rms_norm_eps": 1e-3}),
        ("gpt_oss", {"swiglu_limit": 0.6, "num_key_value_heads": 1}),
        ("olmoe", {"norm_topk_prob": True}),
        ("granitemoe", {"attention_bias": True}),
    ],
)
def test_switches(family: str, overrides: dict[str, Any], tmp_path: Path) -> None:
    _compare(tmp_path, tiny_checkpoint(family, tmp_path, num_hidden_layers=2, **overrides))
