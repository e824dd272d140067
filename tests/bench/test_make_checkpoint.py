"""The checkpoint writer: readable by the libraries it is meant for, sane activations, varied routing, same bytes."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from make_checkpoint import Shape, plan_model, write_checkpoint
from safetensors_stream import Planned, split_into_shards
from tiny_tokenizer import vocabulary
from transformers import AutoTokenizer, Qwen3MoeForCausalLM

TINY = Shape(layers=3, hidden=48, heads=4, kv_heads=2, head_dim=16, experts=8, top_k=2, width=24, vocab=400)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("checkpoint")
    write_checkpoint(output, TINY, shard_bytes=40_000, seed=5)
    return output


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def test_default_shape_is_the_documented_size() -> None:
    total = sum(tensor.nbytes(torch.bfloat16) for tensor in plan_model(Shape(), 1.5))
    assert total == pytest.approx(3.44e9, rel=0.01)


def test_transformers_loads_every_tensor(checkpoint: Path) -> None:
    model, report = Qwen3MoeForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert sum(p.numel() for p in model.parameters()) == sum(t.nbytes(torch.bfloat16) // 2 for t in plan_model(TINY, 1))


def test_activations_stay_sane_and_all_experts_are_used(checkpoint: Path) -> None:
    model = Qwen3MoeForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    ids = torch.randint(0, TINY.vocab, (4, 64), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        seen = model(ids, output_hidden_states=True, output_router_logits=True)
    for hidden in seen.hidden_states[:-1]:
        assert 0.5 < hidden.square().mean().sqrt() < 4
    assert 1 < seen.logits.std() < 6
    for logits in seen.router_logits:  # [T, E]
        shares = torch.bincount(logits.topk(TINY.top_k).indices.flatten(), minlength=TINY.experts) / logits.shape[0]
        assert shares.min() > 0.02
        assert shares.max() < 0.8


def test_same_flags_give_the_same_bytes(checkpoint: Path, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, TINY, shard_bytes=40_000, seed=5)
    assert digests(tmp_path) == digests(checkpoint)


def test_another_seed_gives_other_weights(checkpoint: Path, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, TINY, shard_bytes=40_000, seed=6)
    different = {name for name, digest in digests(tmp_path).items() if digest != digests(checkpoint)[name]}
    assert different == {path.name for path in checkpoint.glob("*.safetensors")}


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_other_dtypes(dtype: str, tmp_path: Path) -> None:
    shape = replace(TINY, layers=1)
    assert write_checkpoint(tmp_path, shape, dtype=dtype) == sum(
        tensor.nbytes(getattr(torch, dtype)) for tensor in plan_model(shape, 1.5)
    )
    model = Qwen3MoeForCausalLM.from_pretrained(tmp_path, dtype="auto")
    assert model.dtype == getattr(torch, dtype)


def test_tokenizer_encodes_any_text_and_decodes_any_id(checkpoint: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    text = "Hello, wörld! 日本 🎉\n"
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text
    assert len(tokenizer) == TINY.vocab
    assert all(tokenizer.decode([index]) for index in range(TINY.vocab))


def test_vocabulary_has_no_duplicates() -> None:
    tokens = vocabulary(60_000)
    assert len(tokens) == len(set(tokens)) == 60_000


def test_vocabulary_below_the_bytes_is_refused() -> None:
    with pytest.raises(SystemExit, match="259"):
        vocabulary(258)


def test_shards_keep_order_and_limit() -> None:
    tensors = [Planned(str(index), (size,), 1.0) for index, size in enumerate([4, 4, 9, 1, 8, 20, 1])]
    shards = split_into_shards(tensors, torch.bfloat16, limit=20)  # ten elements
    assert [[tensor.shape[0] for tensor in shard] for shard in shards] == [[4, 4], [9, 1], [8], [20], [1]]
