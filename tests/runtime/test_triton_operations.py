"""A whole model through the Triton kernels: transformers' logits, and a row's bits are its own.

The kernels run in the interpreter on host memory, which is slow: models and prompts are as small as they can be. The
GPU check (bench/gpu_check.py) does the same on a card, in its types.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_runs import random_prompts, run_engine
from equality import assert_matches_transformers
from tiny_models import tiny_checkpoint

from batchgen_lite.models.layers import Skeleton
from batchgen_lite.models.spec import ModelSpec
from batchgen_lite.offload.devices.protocol import Device
from batchgen_lite.offload.embedding import EmbeddingTable
from batchgen_lite.offload.kv import KVPool
from batchgen_lite.offload.stream import WeightStream
from batchgen_lite.offload.workspace import Workspace
from batchgen_lite.runtime import runner
from batchgen_lite.runtime.device_transfers import Transfers
from batchgen_lite.runtime.triton_operations import TritonOperations, triton_reason

# family, and what makes it small: dense with grouped queries; many experts; latent attention and shared experts; sinks,
# windows, biases, alternating pairs
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3_moe": {"num_experts": 10, "num_experts_per_tok": 3},
    "deepseek_v2": {},
    "gpt_oss": {"sliding_window": 5},
}
LENGTHS = (2, 9, 4, 1, 3, 2, 3)
TOKENS = 2


@pytest.fixture(autouse=True)
def through_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's sweeps on the CPU run these operations, in a workspace that is large enough for them."""

    def make(
        device: Device,
        spec: ModelSpec,
        skeleton: Skeleton,
        stream: WeightStream,
        embedding: EmbeddingTable,
        kv: KVPool,
        workspace: Workspace,
        staging_bytes: int,
        owned: ExitStack,
    ) -> TritonOperations:
        assert triton_reason(device.torch_device, spec) is None
        transfers = Transfers(device, 1 << 20)
        owned.callback(transfers.close)
        return TritonOperations(spec, skeleton, stream, embedding, kv, workspace, transfers, torch.float32)

    monkeypatch.setattr(runner, "make_operations", make)
    monkeypatch.setattr(runner, "Workspace", lambda nbytes, *rest: Workspace(8 * nbytes, *rest))


@pytest.mark.parametrize("family", MODELS)
def test_logits_are_transformers_and_rows_do_not_see_their_neighbours(family: str, tmp_path: Path) -> None:
    reference = tiny_checkpoint(family, tmp_path, num_hidden_layers=2, **MODELS[family])
    prompts = random_prompts(LENGTHS)
    together = run_engine(tmp_path, prompts, TOKENS, keep_logits=True, threads=1)
    assert_matches_transformers(reference, prompts, together)
    alone = run_engine(
        tmp_path, prompts[1:2], TOKENS, keep_logits=True, threads=1, token_budget=16, resident_bytes=0,
        ring_bytes=1 << 20,
    )  # fmt: skip
    assert not alone.plan.all_resident
    assert alone.tokens[0] == together.tokens[1]
    assert torch.equal(alone.logits[0], together.logits[1])
