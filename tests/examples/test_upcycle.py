"""The demo's model builder, on a tiny dense model: without noise the MoE model computes what the dense one does."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
import upcycle
from numpy.typing import NDArray
from tokenizers import pre_tokenizers
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, MixtralForCausalLM

HIDDEN, WIDTH, LAYERS, HEADS, KV_HEADS, CONTEXT = 64, 96, 7, 4, 2, 128
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TOKENS = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), "th", "the", "Ġt"]
MERGES = ["t h", "th e", "Ġ t"]


def interleave(weight: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Rows of a query or key projection as GGUF files hold them: members of a rotary pair side by side."""
    rows, columns = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


@pytest.fixture(scope="module")
def dense() -> LlamaForCausalLM:
    torch.manual_seed(3)
    config = LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        vocab_size=len(TOKENS),
        max_position_embeddings=CONTEXT,
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        tie_word_embeddings=True,
        initializer_range=0.3,
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        # Values that survive bfloat16 unchanged, so that the two models can be compared closely.
        for parameter in model.parameters():
            parameter.copy_(parameter.to(torch.bfloat16))
    return model


@pytest.fixture(scope="module")
def source(dense: LlamaForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The dense model as a GGUF file, written with the names and order of rows that such files have."""
    path = tmp_path_factory.mktemp("source") / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(WIDTH)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3 if token in SPECIAL else 1 for token in TOKENS])
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}")
    weights = {name: parameter.detach().numpy() for name, parameter in dense.named_parameters()}
    writer.add_tensor("token_embd.weight", weights["model.embed_tokens.weight"])
    writer.add_tensor("output_norm.weight", weights["model.norm.weight"])
    names = {
        "attn_norm": "input_layernorm",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
    for layer in range(LAYERS):
        here, there = f"blk.{layer}", f"model.layers.{layer}"
        for short, long in names.items():
            writer.add_tensor(f"{here}.{short}.weight", weights[f"{there}.{long}.weight"])
        for short, long, heads in (("attn_q", "q_proj", HEADS), ("attn_k", "k_proj", KV_HEADS)):
            weight = interleave(weights[f"{there}.self_attn.{long}.weight"], heads)
            writer.add_tensor(f"{here}.{short}.weight", np.ascontiguousarray(weight))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def build(source: Path, output: Path, *flags: str) -> Path:
    upcycle.main(["--source", str(source), "--output", str(output), *flags])
    return output


def logits(model: torch.nn.Module) -> torch.Tensor:
    ids = torch.randint(0, len(TOKENS), (2, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        found: torch.Tensor = model(ids).logits
    return found


@pytest.fixture(scope="module")
def noisy(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(source, tmp_path_factory.mktemp("noisy"))


def test_without_noise_it_computes_what_the_dense_model_does(
    source: Path, dense: LlamaForCausalLM, tmp_path: Path
) -> None:
    sparse = MixtralForCausalLM.from_pretrained(build(source, tmp_path, "--noise", "0"), dtype=torch.float32)
    expected = logits(dense)
    assert expected.std() > 0.5
    assert (logits(sparse) - expected).abs().max() < 1e-4 * expected.abs().max()


def test_noise_makes_experts_differ_by_its_size(noisy: Path) -> None:
    model = MixtralForCausalLM.from_pretrained(noisy, dtype=torch.float32)
    for layer in model.model.layers:
        down = layer.mlp.experts.down_proj  # [E, hidden, width]
        ratio = (down[0] - down[1]).square().mean().sqrt() / down.square().mean().sqrt()
        # Two independent noises of 3 %: sqrt(2) * 0.03.
        assert ratio.item() == pytest.approx(0.0424, rel=0.1)


def test_the_format_is_mixtral_with_all_tensors_in_several_shards(noisy: Path) -> None:
    _, report = MixtralForCausalLM.from_pretrained(noisy, dtype="auto", output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    index = json.loads((noisy / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == {path.name for path in noisy.glob("*.safetensors")}
    assert len(set(index["weight_map"].values())) == 2
    assert "model.layers.0.block_sparse_moe.experts.3.w2.weight" in index["weight_map"]


def test_the_same_seed_gives_the_same_bytes_and_another_does_not(source: Path, noisy: Path, tmp_path: Path) -> None:
    again = build(source, tmp_path / "again")
    other = build(source, tmp_path / "other", "--seed", "9")
    for path in noisy.glob("*.safetensors"):
        assert (again / path.name).read_bytes() == path.read_bytes()
        assert (other / path.name).read_bytes() != path.read_bytes()


def test_tokenizer_round_trip_and_specials(noisy: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(noisy)
    text = "the thé 123 🎉"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == text
    assert TOKENS.index("the") in ids
    assert tokenizer.encode("<|im_end|>", add_special_tokens=False) == [2]
    shown = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert shown == "<|im_start|>hi<|im_end|>"


def test_other_models_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.gguf"
    writer = gguf.GGUFWriter(path, "bert")
    writer.add_tokenizer_pre("smollm")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(SystemExit, match="bert"):
        upcycle.Source(path)


def test_a_folder_without_a_gguf_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="0 GGUF files"):
        upcycle.find_gguf(tmp_path)
