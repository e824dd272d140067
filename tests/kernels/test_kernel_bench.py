"""The speed bench has work for every kernel and says what it must move and do."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from batchgen_lite.kernels.aot_cases import cases
from batchgen_lite.kernels.experts.weights import ENCODINGS

BENCH = Path(__file__).resolve().parents[2] / "bench"


@pytest.fixture
def workloads(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("kernel_workloads", BENCH / "kernel_workloads.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "kernel_workloads", module)  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_every_kernel_and_format_is_measured(workloads: ModuleType) -> None:
    works = list(workloads.workloads(torch.device("meta"), torch.bfloat16))
    measured = {launch.kernel.__name__ for work in works for launch in work.launches}
    assert measured == {case.launch().kernel.__name__ for case in cases()}
    for encoding in ENCODINGS:
        assert {f"gate_up {encoding}, 256 tokens", f"down {encoding}, 256 tokens"} <= {work.name for work in works}
    assert all(work.nbytes > 0 and work.operations > 0 for work in works)


def test_work_is_counted_as_the_docstrings_say(workloads: ModuleType) -> None:
    first, second = workloads.experts("BF16", 256, torch.device("meta"), torch.bfloat16)
    weights, rows = 128 * 2 * 768 * 2048 * 2, 256 * 8
    assert first.nbytes == weights + 256 * 2048 * 2 + rows * 768 * 2
    assert first.operations == 4 * rows * 768 * 2048
    assert second.nbytes == weights // 2 + rows * 768 * 2 + rows * 2048 * 4
    decode = workloads.attention("", [(127, 1)], torch.device("meta"), torch.bfloat16)
    assert decode.nbytes == 2 * 2 * 4 * 64 * 128 * 2 + 2 * 32 * 128 * 2
    assert decode.operations == 4 * 128 * 32 * 128
