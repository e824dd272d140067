"""Packed models: what they hold, and that they run like the source with its experts rounded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_runs import ON_SIM, Result, random_prompts, run_engine
from equality import assert_matches_transformers, assert_same_bits
from tiny_gguf import tiny_gguf
from tiny_models import tiny_checkpoint
from tiny_quantised import tiny_quantised

from batchgen_lite.errors import BudgetError, CheckpointError, OutputExistsError, UnsupportedError, UsageError
from batchgen_lite.kernels.dequant.rows import decode_rows
from batchgen_lite.models.load import load_model
from batchgen_lite.offload.checkpoint.open import open_checkpoint
from batchgen_lite.offload.checkpoint.packed_directory import PACK_INDEX
from batchgen_lite.pack.packing import PackOptions, pack_model, verify_packed
from batchgen_lite.pack.quantise import quantise_rows

SIZES: dict[str, Any] = {"hidden_size": 96, "num_hidden_layers": 2}
MOE: dict[str, Any] = {**SIZES, "moe_intermediate_size": 64}
PROMPTS = random_prompts((2, 33, 70))


def rounded(weights: torch.Tensor, encoding: str) -> torch.Tensor:
    """[..., cols] as it comes out of a packed model."""
    rows = weights.reshape(-1, weights.shape[-1]).contiguous()
    out = torch.empty_like(rows)
    decode_rows(encoding, quantise_rows(encoding, rows, "weights"), out)
    return out.view(weights.shape)


def round_experts(model: Any, encoding: str) -> None:
    """Give the transformers model the weights that the packed one has."""
    turned = model.config.model_type == "gpt_oss"  # stored [E, in, out]
    with torch.no_grad():
        for name, weights in model.named_parameters():
            if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
                rows = weights.transpose(1, 2) if turned else weights
                out = rounded(rows, encoding)
                weights.copy_(out.transpose(1, 2) if turned else out)


def generate(path: Path, **options: Any) -> Result:
    return run_engine(path, PROMPTS, 4, keep_logits=True, threads=1, **options)


def check(path: Path, reference: Any) -> None:
    resident = generate(path)
    assert_matches_transformers(reference, PROMPTS, resident)
    streamed = generate(path, resident_bytes=0, ring_bytes=1 << 20)
    assert not streamed.plan.all_resident
    assert_same_bits(resident, streamed)
    assert_same_bits(resident, generate(path, **ON_SIM))


@pytest.mark.parametrize(
    ("options", "encoding"),
    [
        (PackOptions(4), "Q4_0"),
        (PackOptions(4, 32, True), "Q4_1"),
        (PackOptions(4, 64), "I4_G64"),
        (PackOptions(4, 64, True), "I4M_G64"),
        (PackOptions(8), "Q8_0"),
        (PackOptions(8, 32, True), "I8M_G32"),
        (PackOptions(8, 64), "I8_G64"),
        (PackOptions(8, 64, True), "I8M_G64"),
    ],
)
def test_every_encoding(options: PackOptions, encoding: str, tmp_path: Path) -> None:
    source, packed = tmp_path / "source", tmp_path / "packed"
    model = tiny_checkpoint("qwen3_moe", source, **{**MOE, "hidden_size": 128, "num_hidden_layers": 1})
    pack_model(source, packed, options)
    assert load_model(packed).weights.layers[0].experts[3].down.encoding == encoding
    round_experts(model, encoding)
    check(packed, model)


@pytest.mark.parametrize(
    ("family", "sizes", "experts"),
    [
        ("mixtral", {**SIZES, "intermediate_size": 64}, "stacked"),
        ("deepseek_v3", MOE, "separate"),
        ("qwen2_moe", {**MOE, "mlp_only_layers": [1]}, "separate"),
        ("granitemoeshared", {**SIZES, "intermediate_size": 64}, "separate"),
        ("gpt_oss", {**SIZES, "intermediate_size": 64}, "stacked"),
    ],
)
def test_every_way_of_storing_experts(family: str, sizes: dict[str, Any], experts: str, tmp_path: Path) -> None:
    source, packed = tmp_path / "source", tmp_path / "packed"
    model = tiny_checkpoint(family, source, experts=experts, shards=2, **sizes)
    pack_model(source, packed, PackOptions(4))
    round_experts(model, "Q4_0")
    check(packed, model)


@pytest.mark.parametrize(("family", "scheme"), [("qwen3_moe", "fp8"), ("gpt_oss", "mxfp4")])
def test_quantised_sources(family: str, scheme: str, tmp_path: Path) -> None:
    """Their dense parts stay in the source's own scheme."""
    source, packed = tmp_path / "source", tmp_path / "packed"
    model = tiny_quantised(family, scheme, source, head_dim=32)
    pack_model(source, packed, PackOptions(8))
    round_experts(model, "Q8_0")
    check(packed, model)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_keep_changes_no_bit(family: str, tmp_path: Path) -> None:
    source, packed = tmp_path / "source", tmp_path / "packed"
    tiny_checkpoint(family, source, dtype="bfloat16", **SIZES)
    pack_model(source, packed, PackOptions(None))
    assert open_checkpoint(packed).format == "packed"
    assert_same_bits(generate(source), generate(packed, resident_bytes=0, ring_bytes=1 << 20))


def test_a_sweep_reads_a_third_of_the_bytes(tmp_path: Path) -> None:
    """Over-reads at the ends of extents included; embedding and attention, which stay as they are, are small here."""
    source, packed = tmp_path / "source", tmp_path / "packed"
    sizes = {"hidden_size": 128, "moe_intermediate_size": 128, "num_experts": 48, "num_hidden_layers": 2}
    tiny_checkpoint("qwen3_moe", source, dtype="bfloat16", **sizes)
    pack_model(source, packed, PackOptions(4))
    prompts = random_prompts([30] * 24)
    streamed = {"resident_bytes": 0, "ring_bytes": 1 << 20, "token_budget": 1024}
    # Many sweeps: what is read ahead of a sweep that does not come, at most a ring, must not count for much.
    before, after = (run_engine(path, prompts, 12, threads=1, **streamed).summary for path in (source, packed))
    assert before.sweeps == after.sweeps
    assert before.bytes_read / before.sweeps > 3 * after.bytes_read / after.sweeps


def test_blobs_are_aligned_and_layers_lie_in_order(tmp_path: Path) -> None:
    source, packed = tmp_path / "source", tmp_path / "packed"
    tiny_checkpoint("qwen3_moe", source, dtype="bfloat16", shards=3, **MOE)
    report = pack_model(source, packed, PackOptions(4))
    checkpoint = open_checkpoint(packed)
    assert [file.path.name for file in checkpoint.files] == ["layer-00000.bin", "layer-00001.bin", "outside-layers.bin"]
    for name, info in checkpoint.tensors.items():
        if name.startswith("packed."):
            assert info.extent.file == int(name.split(".")[2])
        if name.endswith(".gate_up") or not name.startswith("packed."):
            assert info.extent.offset % 4096 == 0, name
    # An expert's two matrices lie end to end: they are read as one.
    gate_up, down = (checkpoint.tensors[f"packed.layers.1.experts.7.{role}"] for role in ("gate_up", "down"))
    assert gate_up.extent.offset + gate_up.extent.nbytes == down.extent.offset
    experts = 2 * 24 * 3 * 64 * 96
    assert (report.source_expert_bytes, report.packed_expert_bytes) == (2 * experts, experts // 32 * 18)
    assert report.packed_bytes == sum(file.size for file in checkpoint.files)


def test_what_belongs_to_a_model_comes_along(tmp_path: Path) -> None:
    source, packed = tmp_path / "source", tmp_path / "packed"
    tiny_checkpoint("qwen3_moe", source, dtype="bfloat16", config_changes={"dtype": ...}, **MOE)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (source / name).write_text(f"content of {name}")
    pack_model(source, packed, PackOptions(4))
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        assert (packed / name).read_bytes() == (source / name).read_bytes()
    # The source's dtype follows from its tensors, which are others now.
    assert load_model(packed).spec.dtype == load_model(source).spec.dtype == "bfloat16"
    index = json.loads((packed / PACK_INDEX).read_text())
    assert index["settings"]["fingerprint"] == open_checkpoint(source).fingerprint


def test_refusals(tmp_path: Path) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    tiny_checkpoint("qwen3_moe", source, **{**MOE, "num_hidden_layers": 1, "moe_intermediate_size": 32})
    with pytest.raises(BudgetError, match=r"packing this model takes .* are allowed; give --ram \d+MiB") as caught:
        pack_model(source, out, PackOptions(4, ram=1 << 20))
    assert caught.value.smallest is not None
    with pytest.raises(UnsupportedError, match="rows of 96 weights, no multiple of the group 64; try --group 32"):
        pack_model(source, out, PackOptions(4, 64))
    tiny_gguf("qwen3_moe", tmp_path / "tiny.gguf", num_hidden_layers=1)
    with pytest.raises(UnsupportedError, match=r"tiny\.gguf is a GGUF file"):
        pack_model(tmp_path / "tiny.gguf", out, PackOptions(4))
    tiny_checkpoint("llama", tmp_path / "dense", num_hidden_layers=1)
    with pytest.raises(UsageError, match="has no routed experts"):
        pack_model(tmp_path / "dense", out, PackOptions(4))
    assert not list(tmp_path.glob("out*"))
    pack_model(source, out, PackOptions(4))
    with pytest.raises(OutputExistsError, match="out exists; remove it"):
        pack_model(source, out, PackOptions(4))
    with pytest.raises(UsageError, match="out is packed already"):
        pack_model(out, tmp_path / "again", PackOptions(4))


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("packed")
    tiny_checkpoint("qwen3_moe", root / "source", **{**MOE, "num_hidden_layers": 1})
    pack_model(root / "source", root / "packed", PackOptions(4))
    return root / "packed"


def change_index(packed: Path, change: Any) -> Path:
    """A second directory over the same weights with a changed index."""
    index = json.loads((packed / PACK_INDEX).read_text())
    change(index)
    (packed / PACK_INDEX).write_text(json.dumps(index))
    return packed


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda index: index.update(format="other"), "format is 'other'"),
        (lambda index: index.update(version=2), "version 2 of the packed format"),
        (lambda index: index.pop("tensors"), "settings, files or tensors are missing"),
        (lambda index: index["files"][0].update(name="../layer-00000.bin"), "not a plain file name"),
        (lambda index: index["files"][0].update(nbytes=-1), "does not describe a file"),
        (lambda index: index["files"][0].update(nbytes=1 << 30), "the index says 1073741824"),
        (lambda index: index["tensors"].update(x=["Q4_0", [2, 32], 0, 1 << 40]), "beyond the end of layer-00000"),
        (lambda index: index["tensors"].update(x=["Q4_0", [2, 32], 9, 0]), "file 9 at 0 is none of the 2 files"),
        (lambda index: index["tensors"].update(x=["Q4_0", [2, 32], 0, -8]), "file 0 at -8 is none"),
        (lambda index: index["tensors"].update(x=["Q4_0", [2, 0], 0, 0]), "is no shape"),
        (lambda index: index["tensors"].update(x=["Q4_0", [2, 33], 0, 0]), "not a multiple of the block size 32"),
        (lambda index: index["tensors"].update(x=["Q9_9", [2, 32], 0, 0]), "Q9_9 cannot be in a packed model"),
        (lambda index: index["tensors"].update(x=[4]), "is not .encoding, shape, file, offset."),
        (lambda index: index["tensors"].update(x=["F32", [2], 0, 0]), "the model has no place for x"),
        (lambda index: index["tensors"].pop("packed.layers.0.experts.5.down"), "experts.5.down' is missing"),
    ],
)
def test_indexes_that_cannot_be_true(change: Any, message: str, packed: Path) -> None:
    original = (packed / PACK_INDEX).read_bytes()
    try:
        with pytest.raises((CheckpointError, UnsupportedError), match=message):
            load_model(change_index(packed, change))
    finally:
        (packed / PACK_INDEX).write_bytes(original)


def test_verify_finds_one_wrong_bit(packed: Path) -> None:
    notes: list[str] = []
    assert verify_packed(packed, notes.append) == sum(file.stat().st_size for file in packed.glob("*.bin"))
    assert notes[-1] == "verified 2 of 2 files"
    path = packed / "layer-00000.bin"
    data = bytearray(path.read_bytes())
    data[12345] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"layer-00000\.bin is damaged"):
        verify_packed(packed)
    data[12345] ^= 1
    path.write_bytes(data)
    verify_packed(packed)
