"""The planner's arithmetic on activations against what sweeps really take."""

from __future__ import annotations

from pathlib import Path

import pytest
from engine_runs import random_prompts, run_engine
from tiny_models import tiny_checkpoint

from batchgen_lite.kernels import products
from batchgen_lite.kernels.padding import ROW_PADDING, column_stride
from batchgen_lite.offload import workspace as workspace_module
from batchgen_lite.offload.devices.protocol import Device, DeviceMemory
from batchgen_lite.offload.workspace import Workspace


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "qwen2_moe", "gpt_oss", "deepseek_v3"])
@pytest.mark.parametrize("lengths", [(3,), (90, 120, 200), (40,) * 30])
@pytest.mark.parametrize("aliasing", [0, 72, 28], ids=["plain", "padded", "padded within"])
def test_a_sweep_stays_within_its_planned_workspace(
    family: str, lengths: tuple[int, ...], aliasing: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "ALIASING_COLUMNS", aliasing)
    tiny_checkpoint(family, tmp_path, dtype="bfloat16" if aliasing else "float32")
    made: list[Workspace] = []
    original = Workspace.__init__

    def remember(
        self: Workspace, nbytes: int, device: Device | None = None, memory: DeviceMemory | None = None
    ) -> None:
        original(self, nbytes, device, memory)
        if memory is None:
            made.append(self)

    monkeypatch.setattr(workspace_module.Workspace, "__init__", remember)
    result = run_engine(tmp_path, random_prompts(lengths), 3)
    assert result.errors == {}
    assert "sweeps retried" not in result.summary.extra
    (workspace,) = made
    planned = result.plan.workspace_bytes
    assert workspace.peak <= planned
    assert workspace.peak > 0.4 * planned  # an estimate that is far too large takes memory from the KV cache


def test_rows_of_a_transposed_result_are_an_odd_number_of_lines_apart() -> None:
    for columns in range(ROW_PADDING, 4200, ROW_PADDING):
        stride = column_stride(columns)
        assert stride // ROW_PADDING % 2 == 1
        assert 0 <= stride - columns <= ROW_PADDING


def test_a_workspace_that_is_too_small_is_a_memory_error() -> None:
    workspace = Workspace(1000)
    workspace.take(10, 10)
    mark = workspace.mark()
    workspace.take(100)
    with pytest.raises(MemoryError, match="in a workspace of 1024"):
        workspace.take(100)
    workspace.rewind(mark)
    assert workspace.take(100).shape == (100,)
