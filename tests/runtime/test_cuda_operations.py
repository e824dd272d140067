"""Which maths a card computes with, and why; the torch path on a card whose streams are fakes."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engine_runs import random_prompts, run_engine
from equality import assert_same_bits
from fake_streams import FakeStreams
from tiny_models import tiny_checkpoint
from waits import watched

from batchgen_lite.kernels import availability
from batchgen_lite.models.load import load_model
from batchgen_lite.models.spec import ModelSpec
from batchgen_lite.offload.devices.cuda import CudaDevice
from batchgen_lite.runtime import build, cuda_operations
from batchgen_lite.runtime.cuda_operations import compute_dtype, kernels_reason

PROMPTS = random_prompts((3, 40, 70))
TOKENS = 3


@pytest.fixture
def spec(tmp_path: Path) -> ModelSpec:
    tiny_checkpoint("llama", tmp_path, num_hidden_layers=1)
    return load_model(tmp_path).spec


@pytest.mark.parametrize(
    ("stored", "capability", "computed"),
    [
        ("bfloat16", (8, 9), torch.bfloat16),
        ("bfloat16", (7, 5), torch.float16),
        ("float16", (12, 0), torch.float16),
        ("float32", (9, 0), torch.float32),
    ],
)
def test_types_of_activations(spec: ModelSpec, stored: str, capability: tuple[int, int], computed: torch.dtype) -> None:
    assert compute_dtype(replace(spec, dtype=stored), capability) == computed


def test_reasons_against_the_kernels(spec: ModelSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    assert kernels_reason(cpu, spec) is None  # in the interpreter
    odd = replace(spec, norm_placement="post", residual_scale=0.5)
    assert "norms come after" in str(kernels_reason(cpu, odd))
    monkeypatch.setattr(availability.importlib.util, "find_spec", lambda _: None)
    assert "triton is not installed" in str(kernels_reason(cpu, spec))


@pytest.mark.parametrize("family", ["llama", "qwen2_moe", "gpt_oss", "deepseek_v2"])
def test_without_kernels_a_card_computes_in_torch_and_says_so(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_checkpoint(family, tmp_path, num_hidden_layers=2)
    on_cpu = run_engine(tmp_path, PROMPTS, TOKENS, keep_logits=True, threads=1)
    streams = FakeStreams(seed=4, free=1 << 30, total=1 << 30, eager=True)
    monkeypatch.setattr(build, "open_device", lambda *_: CudaDevice(streams))
    monkeypatch.setattr(cuda_operations, "unavailable_reason", lambda _: "triton is not installed")
    said: list[dict[str, str]] = []
    describe = build.LocalEngine.describe
    monkeypatch.setattr(build.LocalEngine, "close", _describing(said, describe, build.LocalEngine.close))
    with watched():
        on_card = run_engine(
            tmp_path, PROMPTS, TOKENS, keep_logits=True, threads=1, resident_bytes=0, ring_bytes=1 << 20,
            device_resident_bytes=0, device_ring_bytes=1 << 19,
        )  # fmt: skip
    assert_same_bits(on_cpu, on_card)
    assert streams.copies > 10
    assert said[0]["maths"] == "torch in float32, because triton is not installed"
    assert said[0]["device"].startswith("cuda:0")


def _describing(said: list[dict[str, str]], describe: object, close: object) -> object:
    def closing(engine: build.LocalEngine) -> None:
        said.append(describe(engine))  # type: ignore[operator]
        close(engine)  # type: ignore[operator]

    return closing


def test_the_torch_path_does_not_import_triton() -> None:
    """It is for installations without it."""
    import subprocess

    program = (
        "import sys, batchgen_lite.runtime.cuda_torch_operations, batchgen_lite.runtime.cuda_operations\n"
        "sys.exit('triton' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-P", "-c", program], check=False).returncode == 0
