"""KV on the host, streamed through windows on the simulated device: the same bits, in an order that events prove."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from engine_runs import Result, random_prompts, run_engine
from equality import assert_same_bits
from fake_streams import FakeStreams
from tiny_models import tiny_checkpoint

from batchgen_lite.errors import BudgetError
from batchgen_lite.kernels.attention.reference import SpanRows
from batchgen_lite.models.load import load_model
from batchgen_lite.offload.devices.cuda import CudaDevice
from batchgen_lite.offload.devices.protocol import Lane
from batchgen_lite.offload.devices.sim import OrderError, SimDevice
from batchgen_lite.offload.kv import KVPool
from batchgen_lite.offload.kv_shapes import kv_shapes
from batchgen_lite.offload.kv_streamed import StreamedKV, window_bytes
from batchgen_lite.offload.spill_file import SpillOptions
from batchgen_lite.runtime import build
from batchgen_lite.runtime.migration import MigrationChoice, Tier
from batchgen_lite.runtime.sweep import SweepSpan, cut_slices

FAMILIES = ("llama", "deepseek_v2", "gpt_oss")
LENGTHS, TOKENS = (1, 9, 64, 65, 130, 200, 40, 128), 5
WINDOW = {"device": "sim", "kv_window_pages": 5, "slice_tokens": 16}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {family: tmp_path_factory.mktemp(family) for family in FAMILIES}
    for family, path in made.items():
        tiny_checkpoint(family, path)
    return made


def run(path: Path, **options: Any) -> Result:
    return run_engine(path, random_prompts(LENGTHS), TOKENS, keep_logits=True, **options)


@pytest.mark.parametrize(
    ("family", "kv_dtype"),
    [("llama", "auto"), ("llama", "int8"), ("deepseek_v2", "auto"), ("deepseek_v2", "int8"), ("gpt_oss", "auto")],
)
def test_the_same_bits_as_with_kv_on_the_device(family: str, kv_dtype: str, models: dict[str, Path]) -> None:
    usual = run(models[family], kv_dtype=kv_dtype, device="sim")
    streamed = run(models[family], kv_dtype=kv_dtype, **WINDOW)
    assert_same_bits(usual, streamed)
    assert streamed.plan.kv_window_pages == 5
    assert dict(streamed.plan.accounts)["KV cache"] > 0
    assert "KV cache" not in dict(streamed.plan.device_accounts)


def test_one_slice_alone_waits_for_what_it_has_just_written(models: dict[str, Path]) -> None:
    for family in ("llama", "deepseek_v2"):
        usual = run_engine(models[family], random_prompts([70]), 4, keep_logits=True)
        streamed = run_engine(
            models[family], random_prompts([70]), 4, keep_logits=True, device="sim", kv_window_pages=2
        )
        assert_same_bits(usual, streamed)


def test_evictions_and_the_spill_file_work_with_it(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts, tight = random_prompts((60, 61, 62, 63, 50, 120)), {"kv_pages": 8, "token_budget": 64}
    usual = run_engine(models["llama"], prompts, 80, keep_logits=True)
    evicting = run_engine(models["llama"], prompts, 80, keep_logits=True, **WINDOW, **tight)
    assert_same_bits(usual, evicting)
    assert ", 0 evictions" not in evicting.summary.extra["batch"]

    def choose(self: MigrationChoice, positions: int, free: dict[Tier, int], *_: Any) -> Tier | None:
        return Tier.DISK

    monkeypatch.setattr(MigrationChoice, "choose", choose)
    spilling = run_engine(
        models["llama"], prompts, 80, keep_logits=True, spill=SpillOptions(tmp_path), **WINDOW, **tight
    )
    assert_same_bits(usual, spilling)
    assert not spilling.summary.extra["KV spill"].startswith("0 pauses")


def test_next_pages_come_while_the_present_ones_are_used(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of all windows but the first of a sweep, each was asked for before the one before it was left."""
    early, all_ = [0], [0]
    enter = StreamedKV.enter

    def counting(self: StreamedKV, layer: int, number: int, *, first: bool = False) -> None:
        ahead = self._ahead
        wanted = ahead is not None and (ahead.request.layer, ahead.request.number) == (layer, number)
        early[0] += wanted
        all_[0] += 1
        enter(self, layer, number, first=first)

    monkeypatch.setattr(StreamedKV, "enter", counting)
    run(models["deepseek_v2"], **WINDOW)
    assert all_[0] > 100
    assert early[0] == all_[0]


@pytest.mark.parametrize("lane", list(Lane))
def test_every_wait_is_needed(lane: Lane, models: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the waits of one lane, the simulated device sees an order that nothing guarantees."""
    quiet = [False]
    wait = SimDevice.wait

    def deaf(self: SimDevice, of: Lane, event: Any) -> None:
        if not (quiet[0] and of is lane):
            wait(self, of, event)

    for name in ("enter", "leave", "slice"):
        method = getattr(StreamedKV, name)

        def around(self: StreamedKV, *arguments: Any, _method: Any = method, **more: Any) -> Any:
            quiet[0] = True
            try:
                return _method(self, *arguments, **more)
            finally:
                quiet[0] = False

        monkeypatch.setattr(StreamedKV, name, around)
    monkeypatch.setattr(SimDevice, "wait", deaf)
    usual = run(models["llama"])
    with pytest.raises((OrderError, AssertionError)):
        assert_same_bits(usual, run(models["llama"], **WINDOW))


def test_slices_keep_to_the_pages_of_a_window() -> None:
    spans = [SweepSpan([1], 64 * n, list(range(10 * n, 10 * n + n + 1)), True) for n in range(5)]
    assert [len(part.spans) for part in cut_slices(spans, 100)] == [5]
    assert [len(part.spans) for part in cut_slices(spans, 100, 6)] == [3, 1, 1]
    assert [len(part.spans) for part in cut_slices(spans, 2, 6)] == [2, 1, 1, 1]
    assert [len(part.spans) for part in cut_slices(spans, 100, 1)] == [1] * 5


def test_a_slice_that_sees_more_than_a_window_holds_is_refused(models: dict[str, Path]) -> None:
    spec = load_model(models["llama"]).spec
    pool = KVPool(kv_shapes(spec), 6, torch.float32)
    device = SimDevice(4 * window_bytes(pool, 2))
    kv = StreamedKV(pool, [False] * spec.num_layers, device, 2)
    kv.begin()
    with pytest.raises(ValueError, match="a slice of 3 pages, but a window holds 2"):
        kv.slice([SpanRows(0, 150, 1, [3, 1, 0])])
    kv.close()
    assert device.memory().used == 0


def test_a_device_too_small_for_the_longest_prompt_keeps_kv_on_the_host(models: dict[str, Path]) -> None:
    """Not a wish: the planner comes to it by itself before it refuses."""
    prompts = random_prompts([400, 30, 60])
    with pytest.raises(BudgetError) as caught:
        run_engine(models["llama"], prompts, 1, device="sim", vram=1 << 10)
    least = int(str(caught.value).split("--vram")[1].split("at least ")[1].split("MiB")[0]) << 20
    usual = run_engine(models["llama"], prompts, 4, keep_logits=True)
    for vram in range(least, 0, -(1 << 16)):
        try:
            got = run_engine(models["llama"], prompts, 4, keep_logits=True, device="sim", vram=vram)
        except BudgetError:
            break
        assert_same_bits(usual, got)
        if got.plan.kv_window_pages:
            return
    pytest.fail("no budget made the planner put KV on the host")


@pytest.mark.parametrize(("family", "kv_dtype"), [("llama", "int8"), ("deepseek_v2", "auto")])
def test_a_cards_kernels_find_their_pages_in_windows(
    family: str, kv_dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The Triton kernels, interpreted, on a CUDA device whose streams are fakes."""
    tiny_checkpoint(family, tmp_path, num_hidden_layers=2)
    monkeypatch.setattr(
        build, "open_device", lambda *_: CudaDevice(FakeStreams(3, free=1 << 30, total=1 << 30, eager=True))
    )
    prompts = random_prompts((1, 3, 2))
    usual = run_engine(tmp_path, prompts, 2, keep_logits=True, threads=1, kv_dtype=kv_dtype)
    streamed = run_engine(
        tmp_path, prompts, 2, keep_logits=True, threads=1, kv_dtype=kv_dtype, kv_window_pages=2, slice_tokens=2
    )
    assert streamed.plan.kv_window_pages == 2
    assert usual.plan.kv_window_pages == 0
    assert_same_bits(usual, streamed)
