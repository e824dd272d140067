"""Two budgets divided: kept, used well, and refused with both figures. Sizes are made up; no tensor is touched."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from fake_streams import FakeStreams
from hypothesis import given, settings
from hypothesis import strategies as st

from batchgen_lite.errors import BudgetError
from batchgen_lite.offload.devices.cuda import CudaDevice
from batchgen_lite.runtime.activations import ActivationShape
from batchgen_lite.runtime.device_planner import plan_device_memory
from batchgen_lite.runtime.device_transfers import COUNT_BYTES, Transfers
from batchgen_lite.runtime.interface import RequestSize
from batchgen_lite.runtime.planner import DeviceSize, JobSize, MemoryPlan, ModelSize, Overrides

MIB, GIB = 1 << 20, 1 << 30
SHAPE = ActivationShape(
    hidden=2048,
    projections=5120,
    attended=4096,
    intermediate=768,
    experts=128,
    vocab=151936,
    ffn_stage=1024,
    product=2048,
    product_bytes=0,
    scratch=1 << 20,
    kv_heads=4,
    head_dim=128,
    kv_itemsize=2,
    rope_channels=128,
    plan_groups=(8,),
)
MODEL = ModelSize(
    tiles=57 * GIB,
    largest_load=16 * MIB,
    embedding=600 * MIB,
    page=6 * MIB,
    activations=SHAPE,
    skeleton=4 * MIB,
    device=DeviceSize(tiles=57 * GIB, largest_tile=16 * MIB, skeleton=5 * MIB),
)
PROCESS = 300 * MIB


def job(rows: int = 500, prompt: int = 200, new: int = 300) -> JobSize:
    return JobSize.of([RequestSize(prompt, new)] * rows)


def plan(ram: int, vram: int, of: JobSize | None = None, **wish: int) -> MemoryPlan:
    return plan_device_memory(MODEL, of or job(), ram, PROCESS, vram, Overrides(**wish))


@given(
    ram=st.integers(PROCESS, 128 * GIB),
    vram=st.integers(1, 96 * GIB),
    rows=st.integers(1, 2000),
    prompt=st.integers(1, 5000),
    new=st.integers(1, 2000),
)
@settings(max_examples=200)
def test_no_budget_is_ever_exceeded(ram: int, vram: int, rows: int, prompt: int, new: int) -> None:
    try:
        found = plan(ram, vram, job(rows, prompt, new))
    except BudgetError:
        return
    assert sum(nbytes for _, nbytes in found.accounts) <= ram
    assert sum(nbytes for _, nbytes in found.device_accounts) <= vram
    assert all(nbytes >= 0 for _, nbytes in (*found.accounts, *found.device_accounts))
    assert found.kv_pages * 64 >= prompt + 1
    assert found.ring_bytes >= 2 * MODEL.largest_load
    assert found.device_resident_bytes >= MODEL.device.tiles or found.device_ring_bytes >= 2 * 16 * MIB  # type: ignore[union-attr]
    assert found.staging_bytes >= 4 * found.token_budget * SHAPE.hidden


@pytest.mark.parametrize("rows", [1, 2, 3, 40])
@pytest.mark.parametrize("vocab", [151936, 50257])
def test_each_half_of_the_staging_memory_holds_a_row_of_logits(rows: int, vocab: int) -> None:
    model = replace(MODEL, activations=replace(SHAPE, vocab=vocab))
    found = plan_device_memory(model, job(rows, prompt=5), 32 * GIB, PROCESS, 8 * GIB, Overrides(token_budget=16))
    transfers = Transfers(CudaDevice(FakeStreams(), vram=GIB), found.staging_bytes + COUNT_BYTES)
    assert transfers.rows_at_once(vocab, torch.float32) >= 1
    transfers.close()


def test_kv_comes_before_residents_and_the_host_takes_what_the_device_does_not() -> None:
    found = plan(32 * GIB, 8 * GIB)
    accounts, device = dict(found.accounts), dict(found.device_accounts)
    assert device["KV cache"] > 3 * device["residents"]
    assert accounts["residents"] > 25 * GIB  # one read for the whole job instead of one a sweep
    assert found.embedding_resident
    assert not found.all_resident


def test_host_memory_for_the_whole_model_means_that_nothing_streams_from_the_disk() -> None:
    found = plan(64 * GIB, 8 * GIB)
    assert found.all_resident
    assert found.device_ring_bytes > 0  # it still crosses the link


def test_a_device_that_holds_the_model_has_no_ring() -> None:
    found = plan(8 * GIB, 80 * GIB)
    assert found.all_resident
    assert found.device_ring_bytes == found.resident_bytes == 0
    assert found.device_resident_bytes == 57 * GIB


@pytest.mark.parametrize(
    ("ram", "vram", "words"),
    [
        (32 * GIB, 64 * MIB, ["--vram 64MiB is too small", "--ram is enough"]),
        (330 * MIB, 8 * GIB, ["--ram 330MiB is too small beside the device", "--vram is enough"]),
        (330 * MIB, 64 * MIB, ["--vram 64MiB is too small", "--ram 330MiB is too small"]),
    ],
)
def test_what_does_not_fit_is_said_with_both_budgets(ram: int, vram: int, words: list[str]) -> None:
    with pytest.raises(BudgetError) as caught:
        plan(ram, vram)
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert caught.value.exit_code == 4


def test_the_smallest_budgets_that_it_names_are_enough() -> None:
    def named(ram: int, vram: int, flag: str) -> int:
        with pytest.raises(BudgetError) as caught:
            plan(ram, vram)
        text = str(caught.value).split(f"{flag} ")[1]
        return int(text.split("at least ")[1].split("MiB")[0]) * MIB

    ram, vram = named(64 * MIB, 64 * MIB, "--ram"), named(64 * MIB, 64 * MIB, "--vram")
    found = plan(ram, vram)
    assert found.token_budget == 16
    assert found.max_sequences == 1
    for less_ram, less_vram in ((ram - MIB, vram), (ram, vram - MIB)):
        with pytest.raises(BudgetError):
            plan(less_ram, less_vram)


def test_a_small_host_makes_sweeps_smaller_rather_than_refusing() -> None:
    large, small = plan(4 * GIB, 24 * GIB), plan(420 * MIB, 24 * GIB)
    assert small.token_budget < large.token_budget


def test_rows_that_have_to_wait_get_a_share_of_the_host() -> None:
    tight, wide = plan(32 * GIB, 8 * GIB), plan(32 * GIB, 96 * GIB)
    assert 0 < tight.held_pages * MODEL.page <= dict(tight.accounts)["held KV"] <= 2 * GIB
    assert wide.held_pages == 0


def test_a_device_without_room_for_the_longest_prompt_keeps_kv_on_the_host() -> None:
    model = replace(MODEL, layer_page=MODEL.page // 48)
    long = job(rows=40, prompt=100_000)
    with pytest.raises(BudgetError):
        plan_device_memory(MODEL, long, 64 * GIB, PROCESS, 4 * GIB, Overrides())
    found = plan_device_memory(model, long, 64 * GIB, PROCESS, 4 * GIB, Overrides())
    assert found.kv_window_pages * 64 >= 100_300
    assert dict(found.accounts)["KV cache"] == found.kv_pages * MODEL.page
    assert sum(nbytes for _, nbytes in found.accounts) <= 64 * GIB
    assert sum(nbytes for _, nbytes in found.device_accounts) <= 4 * GIB
    assert found.held_pages == 0
    assert plan_device_memory(model, job(), 64 * GIB, PROCESS, 4 * GIB, Overrides()).kv_window_pages == 0


def test_wishes_are_kept() -> None:
    found = plan(
        8 * GIB, 8 * GIB, token_budget=48, kv_pages=50, ring_bytes=64 * MIB, resident_bytes=0,
        device_ring_bytes=48 * MIB, device_resident_bytes=0, slice_tokens=16, max_sequences=9,
    )  # fmt: skip
    assert (found.token_budget, found.kv_pages, found.slice_tokens, found.max_sequences) == (48, 50, 16, 9)
    assert (found.ring_bytes, found.resident_bytes) == (64 * MIB, 0)
    assert (found.device_ring_bytes, found.device_resident_bytes) == (48 * MIB, 0)


def test_a_model_whose_size_on_a_device_is_unknown_is_a_bug() -> None:
    with pytest.raises(AssertionError, match="size on a device is not known"):
        plan_device_memory(replace(MODEL, device=None), job(), 8 * GIB, PROCESS, 8 * GIB, Overrides())
