"""What timing a model's kernels leaves in a process is counted once: as transient, and not as the process's own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny_models import tiny_checkpoint

from batchgen_lite.kernels.products import KERNEL_BYTES
from batchgen_lite.models.layers import load_skeleton
from batchgen_lite.models.load import load_model
from batchgen_lite.models.modules import modules_of
from batchgen_lite.runtime import kernel_times
from batchgen_lite.runtime.model_size import described_size

_PROGRAM = """
import sys
from pathlib import Path
import torch
from batchgen_lite.models.layers import load_skeleton
from batchgen_lite.models.load import load_model
from batchgen_lite.models.modules import modules_of
from batchgen_lite.offload.budget_process import private_bytes, resident_bytes
from batchgen_lite.offload.malloc_tuning import tune_malloc
from batchgen_lite.runtime.kernel_times import time_kernels
from batchgen_lite.runtime.model_size import described_size

tune_malloc()
model = load_model(Path(sys.argv[1]))
size = described_size(model, threads=2)
parts = model.spec, load_skeleton(model), modules_of(model.spec, model.weights), size.activations, torch.bfloat16, 2
before = resident_bytes(), private_bytes()
first, second = time_kernels(*parts), time_kernels(*parts)
after = resident_bytes(), private_bytes()
print(size.activations.product_bytes, first.kept, second.kept, before[0] - after[0], after[1] - before[1])
"""


@pytest.fixture(scope="module")
def timed(tmp_path_factory: pytest.TempPathFactory) -> list[int]:
    path: Path = tmp_path_factory.mktemp("model")
    tiny_checkpoint("qwen3_moe", path, hidden_size=256, moe_intermediate_size=128)
    command = [sys.executable, "-c", _PROGRAM, str(path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    return list(map(int, result.stdout.split()))


def test_what_kernels_keep_is_seen_and_fits_the_account_that_it_is_drawn_from(timed: list[int]) -> None:
    room, kept, _, _, grown = timed
    assert 2 * KERNEL_BYTES < kept <= room
    assert kept <= grown + (4 << 20)  # the rest of the process has not grown meanwhile


def test_kernels_that_are_there_already_are_not_counted_again(timed: list[int]) -> None:
    _, first, second, _, _ = timed
    assert second < first / 3


def test_a_process_with_its_kernels_is_smaller_than_it_was_after_importing_them(timed: list[int]) -> None:
    *_, shrunk, grown = timed
    assert shrunk > 10 << 20
    assert grown > 0


def test_what_others_allocate_meanwhile_is_not_taken_for_the_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_checkpoint("qwen3_moe", tmp_path)
    model = load_model(tmp_path)
    activations = described_size(model, threads=2).activations
    seen = iter([100 << 20, 900 << 20])
    monkeypatch.setattr(kernel_times, "private_bytes", lambda: next(seen))
    monkeypatch.setattr(kernel_times, "measure_compute", lambda *parts: None)
    modules = modules_of(model.spec, model.weights)
    timed = kernel_times.time_kernels(model.spec, load_skeleton(model), modules, activations, torch.bfloat16, 1)
    assert timed.kept == activations.product_bytes < 100 << 20
