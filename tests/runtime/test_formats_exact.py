"""Every storage format through the engine: its logits are transformers' with the dequantised weights, and neither
streaming packed weights nor a device with memory of its own changes a bit. (tests/models/ compares the matrices
themselves.)"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from engine_runs import ON_SIM, Result, random_prompts, run_engine
from equality import assert_matches_transformers, assert_same_bits
from tiny_gguf import ARCHITECTURES, tiny_gguf
from tiny_quantised import tiny_quantised

LENGTHS = (2, 33, 70)
TOKENS = 4
STREAMED = {"resident_bytes": 0, "ring_bytes": 1 << 20}

QUANTISED = [
    ("qwen3_moe", "fp8"),
    ("deepseek_v3", "fp8"),
    ("gpt_oss", "mxfp4"),
    ("mixtral", "gptq"),
    ("qwen3_moe", "awq"),
    ("qwen3_moe", "compressed"),
]
# One type of each kind of block; those of 256 elements need wider rows.
GGUF_TYPES = ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "IQ4_NL", "MXFP4"]
K_TYPES = ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"]
_WIDE: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4, "head_dim": 64}


@pytest.fixture
def fp32_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Our KV cache has the dtype of the file, fp16 for packed GGUF; transformers' has fp32, as all its arithmetic."""
    monkeypatch.setattr("batchgen_lite.models.spec_from_gguf._dtype", lambda checkpoint: "float32")


@pytest.mark.parametrize(("family", "scheme"), QUANTISED)
def test_quantised_checkpoint(family: str, scheme: str, tmp_path: Path) -> None:
    heads = {} if family.startswith("deepseek") else {"head_dim": 32}  # rows of whole groups
    check(tmp_path, tiny_quantised(family, scheme, tmp_path, **heads))


@pytest.mark.usefixtures("fp32_cache")
@pytest.mark.parametrize("family", sorted(ARCHITECTURES))
def test_gguf_architecture(family: str, tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    check(path, tiny_gguf(family, path, encoding="Q8_0", num_hidden_layers=2))


@pytest.mark.usefixtures("fp32_cache")
@pytest.mark.parametrize("encoding", GGUF_TYPES)
def test_gguf_type(encoding: str, tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    check(path, tiny_gguf("qwen3_moe", path, encoding=encoding, num_hidden_layers=1))


@pytest.mark.usefixtures("fp32_cache")
@pytest.mark.parametrize("encoding", K_TYPES)
def test_gguf_k_quant(encoding: str, tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    check(path, tiny_gguf("mixtral", path, encoding=encoding, num_hidden_layers=1, **_WIDE))


@pytest.mark.usefixtures("fp32_cache")
def test_gguf_experts_packed_more_than_the_rest(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    check(path, tiny_gguf("gpt_oss", path, encoding="Q8_0", expert_encoding="MXFP4", num_hidden_layers=2))


def test_gguf_with_its_own_fp16_cache(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    tiny_gguf("qwen3_moe", path, encoding="Q4_1", num_hidden_layers=2)
    check_bits(path)


def check(path: Path, reference: Any) -> None:
    assert_matches_transformers(reference, random_prompts(LENGTHS), check_bits(path))


def check_bits(path: Path) -> Result:
    """The same bits resident, streamed, and on another device."""
    prompts = random_prompts(LENGTHS)
    resident = run_engine(path, prompts, TOKENS, keep_logits=True, threads=1)
    assert resident.plan.all_resident
    streamed = run_engine(path, prompts, TOKENS, keep_logits=True, threads=1, token_budget=48, **STREAMED)
    assert not streamed.plan.all_resident
    assert_same_bits(resident, streamed)
    assert_same_bits(resident, run_engine(path, prompts, TOKENS, keep_logits=True, threads=1, **ON_SIM))
    return resident
