"""The probe of a model's kernels, with a clock that counts operations: what it finds is then the model's own work."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tiny_gguf import tiny_gguf
from tiny_models import tiny_checkpoint
from torch.utils.flop_counter import FlopCounterMode

from batchgen_lite.models.layers import load_skeleton
from batchgen_lite.models.load import load_model
from batchgen_lite.models.modules import modules_of
from batchgen_lite.offload.kv import kv_dtype_of
from batchgen_lite.offload.probe_measure import CpuSeconds
from batchgen_lite.offload.tiles import SHARED_EXPERT
from batchgen_lite.runtime import made_up_tiles
from batchgen_lite.runtime.compute_probe import HEAD_ROWS, ROWS, measure_compute
from batchgen_lite.runtime.compute_times import ComputeTimes
from batchgen_lite.runtime.made_up_tiles import FILL, MadeUpTiles, part_of
from batchgen_lite.runtime.model_size import described_size
from batchgen_lite.runtime.rates import ModelWork

FAMILIES = ["llama", "qwen3_moe", "qwen2_moe", "gpt_oss", "deepseek_v3"]

ONEDNN = {torch.ops.mkldnn._linear_pointwise: lambda x, w, *rest, out_shape: 2 * x[0] * x[1] * w[0]}
"""FLOP of oneDNN's product, which torch does not count by itself."""


def counted(path: Path, kv_dtype: str = "auto") -> tuple[ComputeTimes, ModelWork]:
    """The probe's times in FLOP, and the work as the planner has it."""
    model = load_model(path)
    size = described_size(model)
    modules = modules_of(model.spec, model.weights)
    dtype = kv_dtype_of(kv_dtype, model.spec.dtype)
    with FlopCounterMode(display=False, custom_mapping=ONEDNN) as counter:
        clock: Callable[[], float] = lambda: float(counter.get_total_flops())  # noqa: E731
        parts = model.spec, load_skeleton(model), modules, size.activations, dtype
        times = measure_compute(*parts, clock=clock, cpu_seconds=lambda: CpuSeconds(0.0, 0.0, 0.0))
    assert times is not None
    assert size.work is not None
    return times, size.work


@pytest.mark.parametrize(("family", "kv_dtype"), [*((family, "auto") for family in FAMILIES), ("qwen3_moe", "int8")])
def test_every_module_is_counted_once_for_every_layer(family: str, kv_dtype: str, tmp_path: Path) -> None:
    tiny_checkpoint(family, tmp_path)
    times, work = counted(tmp_path, kv_dtype)
    assert [rows for rows, _ in times.dense.points] == list(ROWS)
    for rows in (*ROWS, 1000):
        assert times.expert.at(rows) == pytest.approx(work.expert_flops * rows)
    for rows in (*HEAD_ROWS, 1000):
        assert times.head.at(rows) == pytest.approx(work.head_flops * rows)
    attention = 8 * work.visit_flops  # of a block of up to eight query rows against one page in all layers
    for rows in (*ROWS, 1000):
        # Attention's own products count as visits, but those of a page that windows leave in sight stay here.
        assert work.dense_flops * rows <= times.dense.at(rows) <= (work.dense_flops + attention) * rows
    assert (times.visit > 0) or family == "gpt_oss"


def test_some_rows_of_large_matrices_stand_for_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_checkpoint("qwen3_moe", tmp_path, hidden_size=128, moe_intermediate_size=256, vocab_size=640)
    whole, work = counted(tmp_path)
    monkeypatch.setattr(made_up_tiles, "MOST_ELEMENTS", 128 * 128)
    part, _ = counted(tmp_path)
    assert part.expert.at(64) == pytest.approx(whole.expert.at(64)) == pytest.approx(work.expert_flops * 64)
    assert part.head.at(64) == pytest.approx(whole.head.at(64))
    assert part.dense.at(64) == pytest.approx(whole.dense.at(64))


@pytest.mark.parametrize("encoding", ["Q4_K", "MXFP4", "BF16"])
def test_made_up_weights_are_ordinary_numbers(encoding: str, tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    tiny_gguf("qwen3_moe", path, expert_encoding=encoding, hidden_size=256, moe_intermediate_size=256)
    model = load_model(path)
    modules = modules_of(model.spec, model.weights)
    source = MadeUpTiles(modules, torch.zeros(1 << 20, dtype=torch.uint8))
    for module in modules:
        part = part_of(module.tiles)
        source.give(module, part.tiles)
        for tile, parts in source.tiles(module):
            weights = torch.empty((tile.stop - tile.start) * tile.matrix.outputs_per_row, tile.matrix.cols)
            tile.matrix.decode(parts, (tile.start, tile.stop), (tile.start, tile.stop), weights)
            assert weights.isfinite().all()
            assert ((weights == 0) | (weights.abs() > 1e-30)).all()  # smaller ones slow the cores down


def test_only_chosen_experts_are_given_and_few_of_them(tmp_path: Path) -> None:
    tiny_checkpoint("qwen2_moe", tmp_path)
    model = load_model(tmp_path)
    modules = modules_of(model.spec, model.weights)
    experts = next(module for module in modules if module.kind == "experts")
    source = MadeUpTiles(modules, torch.full((1 << 20,), FILL, dtype=torch.uint8))
    assert list(source.tiles(experts)) == []
    source.give(experts, experts.tiles)
    counts = torch.zeros(8, dtype=torch.int64)
    counts[[1, 3, 6]] = 5
    assert {tile.expert for tile, _ in source.tiles(experts, counts)} == {SHARED_EXPERT, 1, 3}


@pytest.mark.parametrize(("others", "kept"), [(0.1, True), (0.5, False)])
def test_times_beside_busy_neighbours_are_not_used(others: float, kept: bool, tmp_path: Path) -> None:
    tiny_checkpoint("llama", tmp_path)
    model = load_model(tmp_path)
    modules, activations = modules_of(model.spec, model.weights), described_size(model).activations
    seconds = iter([CpuSeconds(5.0, 10.0, 1.0), CpuSeconds(5.0, 11.0, 2.0 - others)])
    parts = model.spec, load_skeleton(model), modules, activations, torch.bfloat16
    times = measure_compute(*parts, cpu_seconds=lambda: next(seconds))
    assert (times is not None) is kept
