"""Weights kept in fp32: the same stages with and without, as many tiles as fit, and whole runs with the same bits."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from engine_runs import random_prompts, run_engine
from tiny_gguf import tiny_gguf
from tiny_models import tiny_checkpoint

from batchgen_lite.kernels.experts.reference import stage_elements
from batchgen_lite.kernels.experts.stage_memory import StageMemory
from batchgen_lite.models.load import load_model
from batchgen_lite.models.modules import modules_of
from batchgen_lite.offload.tiles import Tile
from batchgen_lite.runtime.widened_tiles import WidenedTiles, widened_bytes

Parts = Sequence[torch.Tensor]


def tiles_of(path: Path) -> list[Tile]:
    model = load_model(path)
    return [tile for module in modules_of(model.spec, model.weights) for tile in module.tiles]


def made_up(tile: Tile, seed: int) -> list[torch.Tensor]:
    """Bytes for a tile of Q8_0 weights."""
    generator = torch.Generator().manual_seed(seed)
    parts = []
    for extent in tile.matrix.extents(tile.start, tile.stop):
        blocks = torch.randint(0, 256, (extent.nbytes // 34, 34), generator=generator).to(torch.uint8)
        scales = torch.rand(len(blocks), 1, generator=generator).to(torch.float16)
        blocks[:, :2] = scales.view(torch.uint8)
        parts.append(blocks.flatten())
    return parts


def stages(widened: WidenedTiles, tile: Tile, parts: Parts) -> list[tuple[int, int, torch.Tensor]]:
    scratch = StageMemory(torch.empty(stage_elements(tile.matrix)))
    return [(start, stop, weights.clone()) for start, stop, weights in widened.stages(tile, parts, scratch)]


def same(one: list[tuple[int, int, torch.Tensor]], other: list[tuple[int, int, torch.Tensor]]) -> bool:
    return len(one) == len(other) and all(
        a[:2] == b[:2] and torch.equal(a[2], b[2]) for a, b in zip(one, other, strict=True)
    )


@pytest.fixture
def tiles(tmp_path: Path) -> list[Tile]:
    tiny_gguf("qwen3_moe", tmp_path / "tiny.gguf", encoding="Q8_0", num_hidden_layers=2)
    packed = [tile for tile in tiles_of(tmp_path / "tiny.gguf") if tile.matrix.encoding != "F32"]
    assert {tile.matrix.encoding for tile in packed} == {"Q8_0"}
    return packed


def test_a_kept_tile_is_not_widened_again(tiles: list[Tile]) -> None:
    widened = WidenedTiles(widened_bytes(tiles))
    for number, tile in enumerate(tiles):
        parts = made_up(tile, number)
        truth = stages(WidenedTiles(), tile, parts)
        assert same(stages(widened, tile, parts), truth)
        # Other bytes in the same place: what comes is what was kept.
        assert same(stages(widened, tile, made_up(tile, 1000 + number)), truth)
    widened.close()


def test_tiles_are_kept_while_there_is_room(tiles: list[Tile]) -> None:
    first, second, *_ = sorted(tiles, key=lambda tile: widened_bytes([tile]))
    widened = WidenedTiles(widened_bytes([first]))
    kept = stages(widened, first, made_up(first, 1))
    assert same(stages(widened, second, made_up(second, 1)), stages(WidenedTiles(), second, made_up(second, 1)))
    assert same(stages(widened, second, made_up(second, 2)), stages(WidenedTiles(), second, made_up(second, 2)))
    assert same(stages(widened, first, made_up(first, 2)), kept)
    widened.close()


def test_a_tile_that_was_left_in_the_middle_takes_no_room(tiles: list[Tile]) -> None:
    tile = tiles[0]
    widened = WidenedTiles(widened_bytes([tile]))
    begun = widened.stages(tile, made_up(tile, 1), StageMemory(torch.empty(stage_elements(tile.matrix))))
    next(begun)
    begun.close()
    whole = stages(widened, tile, made_up(tile, 2))
    assert same(whole, stages(WidenedTiles(), tile, made_up(tile, 2)))
    assert same(stages(widened, tile, made_up(tile, 3)), whole)
    widened.close()


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_no_copies_of_weights_that_are_quick_to_widen(dtype: str, tmp_path: Path) -> None:
    tiny_checkpoint("qwen3_moe", tmp_path, dtype=dtype)
    assert widened_bytes(tiles_of(tmp_path)) == 0


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_answers_are_the_same_bits_with_weights_in_fp32(family: str, tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    tiny_gguf(family, path, encoding="Q8_0", num_hidden_layers=2)
    prompts = random_prompts([5, 70, 33])
    kept = run_engine(path, prompts, 4, keep_logits=True, threads=1)
    streamed = run_engine(path, prompts, 4, keep_logits=True, threads=1, resident_bytes=0)
    assert kept.plan.widened_bytes > 0 == streamed.plan.widened_bytes
    assert dict(kept.plan.accounts)["widened weights"] == kept.plan.widened_bytes
    assert kept.tokens == streamed.tokens
    assert all(torch.equal(kept.logits[row], streamed.logits[row]) for row in range(len(prompts)))
