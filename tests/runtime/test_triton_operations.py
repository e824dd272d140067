"""A whole model through the Triton kernels: transformers' logits, and a row's bits are its own.

The kernels run in the interpreter on host memory, which is slow: models and prompts are as small as they can be. The
GPU check (bench/gpu_check.py) does the same on a card, in its types.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_runs import random_prompts, run_engine
from equality import assert_matches_transformers
from fake_streams import FakeStreams
from hidden_waits import HiddenWaits
from tiny_models import tiny_checkpoint
from waits import watched

from batchgen_lite.offload.devices.cuda import CudaDevice
from batchgen_lite.runtime import build
from batchgen_lite.runtime.sweep import Sampled, Sweeper, SweepSpan

# family, and what makes it small: dense with grouped queries; many experts; latent attention and shared experts; sinks,
# windows, biases, alternating pairs
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"num_hidden_layers": 1},
    "qwen3_moe": {"num_hidden_layers": 1, "num_experts": 10, "num_experts_per_tok": 3},
    "deepseek_v2": {"num_hidden_layers": 2},
    "gpt_oss": {"num_hidden_layers": 2, "sliding_window": 4},
}
LENGTHS = (1, 7, 2, 1, 1, 2, 1)
TOKENS = 2


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> FakeStreams:
    """Engines run on a CUDA device whose streams are fakes, and its memory the host's."""
    made = FakeStreams(seed=11, free=1 << 30, total=1 << 30, eager=True)
    monkeypatch.setattr(build, "open_device", lambda *_: CudaDevice(made))
    return made


@pytest.fixture
def hidden(monkeypatch: pytest.MonkeyPatch, streams: FakeStreams) -> HiddenWaits:
    """Looks on while sweeps run."""
    mode = HiddenWaits(lambda: streams.memory)
    run = Sweeper.run

    def watched_run(self: Sweeper, spans: Sequence[SweepSpan], sample: Sampled) -> None:
        with mode:
            run(self, spans, sample)

    monkeypatch.setattr(Sweeper, "run", watched_run)
    return mode


WAITS_OF_A_SWEEP = {
    "device_transfers.py": "router counts, logits, embeddings' host memory used again",
    "uploads.py": "host memory that a reader refills",
    "runner.py": "everything, before memory is given back",
}
"""Files of the places where the host waits for the device, and for what."""


@pytest.mark.parametrize("family", MODELS)
def test_logits_are_transformers_and_rows_do_not_see_their_neighbours(
    family: str, tmp_path: Path, hidden: HiddenWaits
) -> None:
    reference = tiny_checkpoint(family, tmp_path, **MODELS[family])
    prompts = random_prompts(LENGTHS)
    with watched() as waits:
        together = run_engine(tmp_path, prompts, TOKENS, keep_logits=True, threads=1)
    assert_matches_transformers(reference, prompts, together)
    assert hidden.seen > 20
    assert hidden.found == []
    assert {file for file, _ in waits.synchronised} <= WAITS_OF_A_SWEEP.keys()
    routed = 0 if family == "llama" else 1 if family == "deepseek_v2" else MODELS[family]["num_hidden_layers"]
    assert waits.synchronised["device_transfers.py", "to_host"] == 2 * routed  # sweeps, layers
    assert waits.synchronised["device_transfers.py", "blocks"] <= 2 * len(prompts)
    alone = run_engine(
        tmp_path, prompts[1:2], TOKENS, keep_logits=True, threads=1, token_budget=16, resident_bytes=0,
        ring_bytes=1 << 20, device_resident_bytes=0, device_ring_bytes=1 << 19,
    )  # fmt: skip
    assert not alone.plan.all_resident
    assert alone.tokens[0] == together.tokens[1]
    assert torch.equal(alone.logits[0], together.logits[1])
