"""The engine on a device with memory of its own, when something goes wrong: memory short, a stop, a mistake of ours."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_runs import ON_SIM, Prompts, Result, random_prompts, run_engine
from equality import assert_same_bits
from tiny_models import tiny_checkpoint

from batchgen_lite.errors import BudgetError
from batchgen_lite.kernels.launch import OperandError
from batchgen_lite.offload.devices.protocol import Event, Lane
from batchgen_lite.offload.devices.sim import OrderError, SimDevice, SimEvent
from batchgen_lite.runtime import runner as runner_module
from batchgen_lite.runtime.build import LocalEngine, build_engine
from batchgen_lite.runtime.interface import SampledToken
from batchgen_lite.runtime.options import EngineOptions
from batchgen_lite.runtime.placement import Placement
from batchgen_lite.runtime.planner import MemoryPlan, Overrides
from batchgen_lite.runtime.sampler import Sampler
from batchgen_lite.runtime.sim_operations import SimOperations
from batchgen_lite.sampling_params import SamplingParams

LENGTHS = (3, 40, 70)
TOKENS = 5
Pairs = Sequence[tuple[torch.Tensor, torch.Tensor]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    tiny_checkpoint("deepseek_v3", path)
    return path


@pytest.fixture(scope="module")
def truth(model: Path) -> Result:
    return run_engine(model, random_prompts(LENGTHS), TOKENS, keep_logits=True, threads=1)


def run(model: Path) -> Result:
    return run_engine(model, random_prompts(LENGTHS), TOKENS, keep_logits=True, threads=1, **ON_SIM)


def sim_engine(model: Path, **overrides: int) -> LocalEngine:
    wish = {name: value for name, value in ON_SIM.items() if name != "device"} | overrides
    return build_engine(model, EngineOptions(threads=1, device="sim", overrides=Overrides(**wish)))


# -- memory is short, or the run is stopped ---------------------------------------------------------------------------


@pytest.mark.parametrize("error", [MemoryError, torch.OutOfMemoryError])
@pytest.mark.parametrize("copies", [0, 3, 40])
def test_a_device_that_runs_out_of_memory_gets_smaller_sweeps(
    error: type[Exception], copies: int, model: Path, truth: Result, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, left = SimDevice.copy, copies + 1
    loaded = runner_module.Sweeper.run

    def begin(self: Any, *arguments: Any) -> None:
        monkeypatch.setattr(SimDevice, "copy", copy)  # from the first sweep on, not while the model is loaded
        loaded(self, *arguments)

    def copy(self: SimDevice, lane: Lane, pairs: Pairs) -> SimEvent:
        nonlocal left
        left -= 1
        if left == 0:
            raise error("the device has no memory left")
        return original(self, lane, pairs)

    monkeypatch.setattr(runner_module.Sweeper, "run", begin)
    result = run(model)
    assert result.summary.extra["sweeps retried"].startswith("1,")
    assert_same_bits(truth, result)


def test_a_stopped_run_leaves_the_device_as_the_next_run_needs_it(
    model: Path, truth: Result, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = random_prompts(LENGTHS)
    params = SamplingParams(temperature=0.0, max_tokens=TOKENS)
    engine = sim_engine(model, device_resident_bytes=200_000, resident_bytes=200_000)
    original, sampled = Sampler.sample, 0

    def sample(self: Sampler, logits: torch.Tensor, rows: Sequence[Any]) -> list[SampledToken]:
        nonlocal sampled
        sampled += 1
        if sampled == 2:
            engine.request_stop()
        return original(self, logits, rows)

    monkeypatch.setattr(Sampler, "sample", sample)
    try:
        summary = asyncio.run(engine.run(Prompts(prompts, params)))
        assert summary.stopped_early
        again = Prompts(prompts, params)
        asyncio.run(engine.run(again))
        assert again.tokens == truth.tokens
    finally:
        engine.close()


def test_what_the_plan_grants_and_the_device_refuses_is_given_back(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = sim_engine(model)
    source = Prompts(random_prompts(LENGTHS), SamplingParams(max_tokens=1))
    plan = engine.plan(source)
    device = engine._device
    taken = device.allocate(device.memory().capacity - plan.workspace_bytes)  # somebody else's
    before = device.memory().used
    with pytest.raises(BudgetError, match="of device memory asked for"):
        asyncio.run(engine.run(source))
    assert device.memory().used == before
    taken.close()
    asyncio.run(engine.run(source))
    engine.close()
    assert device.memory().used == 0


# -- mistakes that the simulated device is there for -------------------------------------------------------------------


def mistakes() -> dict[str, tuple[Callable[[pytest.MonkeyPatch], None], type[Exception], str]]:
    """What is done wrong, and how it shows."""

    def tables_stay_on_the_host(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(Placement, "table", lambda self, host: host)

    def vectors_stay_on_the_host(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(runner_module, "skeleton_on", lambda device, skeleton: (skeleton, None))

    def results_come_from_outside_the_workspace(patch: pytest.MonkeyPatch) -> None:
        original = SimOperations.shared
        patch.setattr(SimOperations, "shared", lambda self, name, width: original(self, name, width).clone())

    def compute_waits_for_nothing(patch: pytest.MonkeyPatch) -> None:
        original = SimDevice.wait

        def wait(self: SimDevice, lane: Lane, event: Event) -> None:
            if lane is not Lane.COMPUTE:
                original(self, lane, event)

        patch.setattr(SimDevice, "wait", wait)
        patch.setattr(SimEvent, "done", lambda self: False)

    def weights_wait_for_nothing(patch: pytest.MonkeyPatch) -> None:
        original = SimDevice.wait

        def wait(self: SimDevice, lane: Lane, event: Event) -> None:
            if lane is not Lane.COPY_IN:
                original(self, lane, event)

        patch.setattr(SimDevice, "wait", wait)

    def logits_wait_for_nothing(patch: pytest.MonkeyPatch) -> None:
        original = SimDevice.wait

        def wait(self: SimDevice, lane: Lane, event: Event) -> None:
            if lane is not Lane.COPY_OUT:
                original(self, lane, event)

        patch.setattr(SimDevice, "wait", wait)

    return {
        "index tables stay on the host": (tables_stay_on_the_host, OperandError, "pages: .* lies in host memory"),
        "vectors stay on the host": (vectors_stay_on_the_host, OperandError, "vector 0 of the model: .* lies in host"),
        "results come from outside the workspace": (
            results_come_from_outside_the_workspace,
            OperandError,
            "normed latent of the query|plain part of the query|attended",
        ),
        "compute waits for nothing": (compute_waits_for_nothing, OrderError, "compute reads"),
        "copies of weights wait for nothing": (weights_wait_for_nothing, OrderError, "copy in writes"),
        "copies of logits wait for nothing": (logits_wait_for_nothing, OrderError, "copy out reads"),
    }


@pytest.mark.parametrize("mistake", mistakes())
def test_a_mistake_shows(mistake: str, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make, error, words = mistakes()[mistake]
    make(monkeypatch)
    with pytest.raises(error, match=words):
        run(model)


def test_memory_of_a_sweep_is_poisoned_where_it_is_free(
    model: Path, truth: Result, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever keeps something over the end of a half finds NaN."""
    original = SimOperations.end_half
    kept: list[torch.Tensor] = []

    def end_half(self: SimOperations) -> None:
        if not kept:
            kept.append(self._workspace.memory.tensor[self._mark :][:64].view(torch.float32))
        original(self)

    monkeypatch.setattr(SimOperations, "end_half", end_half)
    plan: MemoryPlan = run(model).plan
    assert plan.workspace_bytes > 0
    assert bool(kept[0].isnan().all())
