"""``batchgen-lite pack`` as users call it, and the figures that it ends with."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from tiny_models import tiny_checkpoint
from tiny_tokenizers import train_byte_level, write_directory

from batchgen_lite.cli.pack import command
from batchgen_lite.errors import OutputExistsError, UsageError
from batchgen_lite.pack.packing import PackOptions, pack_model
from batchgen_lite.pack.quality import TEXT, Quality, measure_quality
from batchgen_lite.runtime.options import EngineOptions
from batchgen_lite.text.tokenizer import load_tokenizer

VOCABULARY = 448
SIZES = {"hidden_size": 96, "moe_intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": VOCABULARY}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    path = tmp_path_factory.mktemp("source") / "tiny"
    model = tiny_checkpoint("qwen3_moe", path, **SIZES)
    write_directory(path, train_byte_level())
    return path, model


def run(*arguments: object) -> Any:
    return CliRunner().invoke(command, [str(argument) for argument in arguments], standalone_mode=False)


def test_packs_verifies_and_says_what_it_costs(source: tuple[Path, Any], tmp_path: Path) -> None:
    out = tmp_path / "packed"
    result = run(source[0], out, "--experts", "int8", "--group", "32", "--verify", "--threads", 1)
    assert result.exception is None
    lines = {line[:15].strip(): line[15:] for line in result.stdout.splitlines()}
    assert list(lines) == ["model", "routed experts", "KL divergence", "perplexity", "same best token"]
    assert "3.76 times smaller" in lines["routed experts"]  # fp32 to 34 bytes for 32 weights
    assert "mean of 49 places" in lines["KL divergence"]
    assert "verified 2 of 2 files" in result.stderr
    again = run(source[0], out, "--verify")
    assert again.exception is None
    assert again.stdout == ""
    assert isinstance(run(source[0], out).exception, OutputExistsError)


def test_without_a_tokenizer_quality_is_not_measured(tmp_path: Path) -> None:
    tiny_checkpoint("qwen3_moe", tmp_path / "source", **SIZES)
    result = run(tmp_path / "source", tmp_path / "packed")
    assert result.exception is None
    assert "not measured" in result.stdout
    assert "has no tokenizer.json" in result.stdout
    assert (tmp_path / "packed").exists()


def test_a_calibration_text_that_is_too_short(source: tuple[Path, Any], tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("hi")
    result = run(source[0], tmp_path / "packed", "--calibration", text)
    assert isinstance(result.exception, UsageError)
    assert "at least 9 are needed" in str(result.exception)


def measure(source: Path, packed: Path) -> Quality:
    return measure_quality(source, packed, TEXT, EngineOptions(threads=1), VOCABULARY, lambda text: None)


def test_quality_is_what_transformers_would_find(source: tuple[Path, Any], tmp_path: Path) -> None:
    """Perplexity of the source; and none of it is lost where nothing is rounded."""
    path, model = source
    pack_model(path, tmp_path / "kept", PackOptions(None))
    kept = measure(path, tmp_path / "kept")
    assert (kept.kl, kept.same_best, kept.places) == (0.0, 1.0, 49)
    assert kept.packed_perplexity == kept.source_perplexity
    tokens = load_tokenizer(path).encode(TEXT, add_special=False)
    likelihoods = []
    for start in range(0, 7 * 64, 64):
        window = tokens[start : start + 64]
        with torch.no_grad():
            logits = torch.log_softmax(model(torch.tensor([window])).logits[0].double(), -1)
        likelihoods += [float(logits[place - 1, window[place]]) for place in range(8, 64, 8)]
    assert kept.source_perplexity == pytest.approx(math.exp(-sum(likelihoods) / 49), rel=1e-4)


def test_fewer_bits_cost_more(source: tuple[Path, Any], tmp_path: Path) -> None:
    found = []
    for bits in (8, 4):
        pack_model(source[0], tmp_path / str(bits), PackOptions(bits))
        found.append(measure(source[0], tmp_path / str(bits)))
    assert 0 < found[0].kl < found[1].kl / 20
    assert abs(found[0].packed_perplexity / found[0].source_perplexity - 1) < 0.01
