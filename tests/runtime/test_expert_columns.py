"""Routed experts whose weights are widened with columns of zeros behind (kernels/products.py: padded_columns): the same
numbers as transformers', the same bits whoever computes an expert, and nothing of what lay in memory before."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engine_runs import random_prompts, run_engine
from equality import assert_matches_transformers, assert_same_bits
from tiny_models import tiny_checkpoint

from batchgen_lite.kernels import products
from batchgen_lite.kernels.experts.reference import stage_elements, widened
from batchgen_lite.kernels.experts.stage_memory import StageMemory
from batchgen_lite.models.load import load_model
from batchgen_lite.models.modules import modules_of
from batchgen_lite.offload.tiles import SHARED_EXPERT, Module, Tile
from batchgen_lite.runtime import cpu_experts, widened_tiles
from batchgen_lite.runtime.cpu_operations import CpuOperations
from batchgen_lite.runtime.expert_columns import expert_columns

HIDDEN, WIDTH = 72, 28  # of the tiny models, and of one of their experts
PROMPTS = random_prompts((1, 9, 33, 64, 130, 40))
FAMILIES = ["qwen3_moe", "qwen2_moe", "gpt_oss", "deepseek_v3"]


@pytest.fixture(params=[HIDDEN, WIDTH], ids=["gate and up", "down"])
def padded(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[set[tuple[int, int]]]:
    """Weights of so many columns are padded. What is seen: columns of matrices, and of their stages."""
    monkeypatch.setattr(products, "ALIASING_COLUMNS", request.param)
    seen: set[tuple[int, int]] = set()

    def spy(matrix: Any, parts: Any, span: Any, scratch: Any, columns: int = 0) -> Iterator[Any]:
        for stage in widened(matrix, parts, span, scratch, columns):
            seen.add((matrix.cols, stage[2].shape[1]))
            yield stage

    for module in (cpu_experts, widened_tiles):
        monkeypatch.setattr(module, "widened", spy)
    yield seen
    assert (request.param, request.param + products.COLUMN_PADDING) in seen


def checkpoint(family: str, path: Path) -> Any:
    width = {"intermediate_size": WIDTH} if family == "gpt_oss" else {}
    return tiny_checkpoint(family, path, dtype="bfloat16", **width)


def routed_tiles(path: Path) -> list[Tile]:
    return [tile for module in routed_modules(path) for tile in module.tiles if tile.expert != SHARED_EXPERT]


def routed_modules(path: Path) -> list[Module]:
    model = load_model(path)
    return [module for module in modules_of(model.spec, model.weights) if module.routed]


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_transformers(family: str, tmp_path: Path, padded: set[tuple[int, int]]) -> None:
    reference = checkpoint(family, tmp_path)
    result = run_engine(tmp_path, PROMPTS, 6, keep_logits=True, threads=2, kv_dtype="float32")
    assert_matches_transformers(reference, PROMPTS, result)


@pytest.mark.parametrize("family", FAMILIES)
def test_bits_are_the_same_whoever_computes_an_expert(
    family: str, tmp_path: Path, padded: set[tuple[int, int]]
) -> None:
    checkpoint(family, tmp_path)
    alone = run_engine(tmp_path, PROMPTS, 6, keep_logits=True, threads=1)
    beside = run_engine(
        tmp_path, PROMPTS, 6, keep_logits=True, threads=2, resident_bytes=0, ring_bytes=1 << 20, max_sequences=4
    )
    assert_same_bits(alone, beside)


def test_memory_is_used_as_it_comes(
    tmp_path: Path, padded: set[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_checkpoint("qwen3_moe", tmp_path, dtype="bfloat16")
    before = run_engine(tmp_path, PROMPTS, 6, keep_logits=True, threads=2)
    begin = CpuOperations.begin

    def dirty(self: CpuOperations, tokens: int) -> None:
        self._workspace.memory.tensor.view(torch.float32).fill_(math.nan)
        begin(self, tokens)

    monkeypatch.setattr(CpuOperations, "begin", dirty)
    assert_same_bits(before, run_engine(tmp_path, PROMPTS, 6, keep_logits=True, threads=2))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("experts", ["separate", "stacked"])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "mixtral"])
def test_a_stage_has_its_weights_and_zeros(family: str, experts: str, dtype: str, tmp_path: Path) -> None:
    tiny_checkpoint(family, tmp_path, dtype=dtype, experts=experts, num_hidden_layers=1)
    for tile in routed_tiles(tmp_path):
        matrix, span = tile.matrix, (tile.start, tile.stop)
        generator = torch.Generator().manual_seed(tile.expert)
        parts = [
            torch.randn(extent.nbytes // 2, generator=generator).to(getattr(torch, dtype)).view(torch.uint8)
            for extent in matrix.extents(*span)
        ]
        dirty = StageMemory(torch.full((2 * stage_elements(matrix),), math.nan))
        plain = StageMemory(torch.empty(stage_elements(matrix)))
        stages = list(_copies(widened(matrix, parts, span, dirty, matrix.cols + 16)))
        expected = list(_copies(widened(matrix, parts, span, plain)))
        assert [stage[:2] for stage in stages] == [stage[:2] for stage in expected]
        for (_, _, weights), (_, _, own) in zip(stages, expected, strict=True):
            assert torch.equal(weights[:, : matrix.cols], own)
            assert torch.equal(weights[:, matrix.cols :], torch.zeros(len(own), 16))


def _copies(stages: Iterator[tuple[int, int, torch.Tensor]]) -> Iterator[tuple[int, int, torch.Tensor]]:
    for start, stop, weights in stages:
        yield start, stop, weights.clone()


def test_only_experts_that_are_all_of_16_bits_are_padded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "ALIASING_COLUMNS", HIDDEN)
    tiny_checkpoint("qwen3_moe", tmp_path / "bf16", dtype="bfloat16", num_hidden_layers=1)
    tiny_checkpoint("qwen3_moe", tmp_path / "fp32", num_hidden_layers=1)
    (halves,), (floats,) = routed_modules(tmp_path / "bf16"), routed_modules(tmp_path / "fp32")
    assert (expert_columns(halves).gate_up, expert_columns(halves).down) == (HIDDEN + 16, WIDTH)
    assert (expert_columns(floats).gate_up, expert_columns(floats).down) == (HIDDEN, WIDTH)
    mixed = SimpleNamespace(tiles=_with_one_of(halves.tiles, floats.tiles))
    assert expert_columns(mixed).gate_up == HIDDEN  # type: ignore[arg-type]
    monkeypatch.setattr(products, "ALIASING_COLUMNS", WIDTH)
    assert (expert_columns(halves).gate_up, expert_columns(halves).down) == (HIDDEN, WIDTH + 16)


def _with_one_of(tiles: Sequence[Tile], others: Sequence[Tile]) -> list[Tile]:
    return [replace(tiles[0], matrix=others[0].matrix), *tiles[1:]]


def test_the_width_is_padded_where_the_processor_wants_it() -> None:
    wants = products.USES_ONEDNN and torch.backends.cpu.get_cpu_capability() == "AVX512"
    assert products.padded_columns(1024) == (1040 if wants else 1024)
    assert [products.padded_columns(columns) for columns in (16, 512, 2048)] == [16, 512, 2048]
