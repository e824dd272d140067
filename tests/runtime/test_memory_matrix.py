"""Budgets from what barely fits to all resident, prompts from 1 to 2,000 tokens, on the CPU and on a device with memory
of its own: every combination gives the same bits and stays within what it was given."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_runs import Result, random_prompts, run_engine
from equality import assert_same_bits
from make_checkpoint import Shape, write_checkpoint
from stub_job import command, write_lines
from tiny_tokenizers import train_byte_level, write_directory
from watch_rss import Watched, watch

from batchgen_lite.errors import BudgetError
from batchgen_lite.offload.devices.sim import SimDevice
from batchgen_lite.offload.workspace import Workspace
from batchgen_lite.runtime.planner import PROCESS_NOISE

MIB = 1 << 20
SHAPE = Shape(layers=2, hidden=192, heads=4, kv_heads=2, head_dim=48, experts=16, top_k=2, width=192, vocab=431)
LENGTHS = (1, 63, 64, 65, 300, 2000)
TOKENS = 3
PROCESS = 300 * MIB


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    write_checkpoint(path, SHAPE)
    return write_directory(path, train_byte_level())


def run(model: Path, **options: Any) -> Result:
    return run_engine(model, random_prompts(LENGTHS), TOKENS, keep_logits=True, threads=1, **options)


@pytest.fixture(scope="module")
def truth(model: Path) -> Result:
    result = run(model)
    assert result.plan.all_resident
    return result


@pytest.fixture
def steady_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test's own process as large in every look at it. What other tests left behind comes and goes by megabytes,
    more than this model has, so the smallest budget of one moment may be too small for the next, or hold everything.
    The last test looks from outside at processes that are real in this, too."""
    monkeypatch.setattr("batchgen_lite.runtime.build.resident_bytes", lambda: PROCESS)


def barely(more: int, attempt: Callable[[int], Result]) -> tuple[int, Result]:
    """A run in ``more`` bytes above the smallest budget; needs ``steady_process``."""
    with pytest.raises(BudgetError) as refused:
        attempt(MIB)
    assert refused.value.smallest is not None
    ram = refused.value.smallest + more
    return ram, attempt(ram)


def smallest_vram(model: Path) -> int:
    with pytest.raises(BudgetError) as caught:
        run(model, device="sim", vram=MIB)
    return int(str(caught.value).split("at least ")[1].split("MiB")[0]) * MIB


@pytest.mark.usefixtures("steady_process")
@pytest.mark.parametrize("more", [0, 3, 12])
def test_on_the_cpu(more: int, model: Path, truth: Result, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Workspace] = []
    original = Workspace.__init__

    def remember(self: Workspace, *arguments: Any) -> None:
        original(self, *arguments)
        made.append(self)

    monkeypatch.setattr(Workspace, "__init__", remember)
    # The budget that is named allows for processes that differ; this one does not.
    ram, result = barely(more * MIB - PROCESS_NOISE, lambda ram: run(model, ram=ram))
    assert_same_bits(truth, result)
    assert sum(nbytes for _, nbytes in result.plan.accounts) <= ram
    assert made[-1].peak <= result.plan.workspace_bytes
    if more == 0:
        assert not result.plan.all_resident
        assert result.plan.token_budget <= 64
        assert result.plan.resident_bytes < MIB


@pytest.mark.parametrize("more", [0, 1, 3, 40])
def test_on_a_device_with_memory_of_its_own(
    more: int, model: Path, truth: Result, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[SimDevice] = []
    original = SimDevice.__init__

    def remember(self: SimDevice, vram: int) -> None:
        original(self, vram)
        made.append(self)

    monkeypatch.setattr(SimDevice, "__init__", remember)
    vram = smallest_vram(model) + more * MIB
    result = run(model, device="sim", vram=vram)
    assert_same_bits(truth, result)
    assert "sweeps retried" not in result.summary.extra
    accounts = dict(result.plan.device_accounts)
    assert made[-1].memory().peak <= sum(accounts.values()) + 16 * 256 <= vram + 16 * 256  # each rounded up
    assert made[-1].memory().used == 0  # and given back
    if more == 0:
        assert result.plan.device_ring_bytes > 0
        assert accounts["residents"] < SHAPE.layers * SHAPE.experts * 3 * SHAPE.hidden * SHAPE.width
    if more == 40:
        assert result.plan.device_ring_bytes == 0


@pytest.mark.usefixtures("steady_process")
def test_the_smallest_budgets_on_both_sides(model: Path, truth: Result) -> None:
    """Hardly anything stays: all goes from the disk through the smallest rings, a few tokens at a time."""
    short = LENGTHS[:4]

    def run_short(**options: Any) -> Result:
        return run_engine(model, random_prompts(short), TOKENS, keep_logits=True, threads=1, device="sim", **options)

    _, result = barely(0, lambda ram: run_short(vram=MIB, ram=ram))
    assert not result.plan.all_resident
    assert result.errors == {}
    for row in range(len(short)):
        assert torch.equal(result.logits[row], truth.logits[row]), row


def test_the_process_stays_within_the_budget_as_seen_from_outside(model: Path, tmp_path: Path) -> None:
    """A fresh process, whose interpreter is what a user's is."""
    lines = [{"token_ids": ids, "max_tokens": TOKENS, "ignore_eos": True} for ids in random_prompts(LENGTHS)]
    prompts = write_lines(tmp_path / "prompts.jsonl", *lines)
    flags = ["--model", str(model), "--input", str(prompts), "--threads", "1"]

    def outside(*arguments: str, ram: int) -> tuple[Watched, str]:
        with open(tmp_path / "said", "w+b") as said:
            seen = watch(command(*arguments, *flags, "--ram", str(ram)), stdout=said, stderr=said)
            said.seek(0)
            return seen, said.read().decode()

    refused, said = outside("plan", ram=MIB)
    assert refused.code == BudgetError.exit_code
    smallest = int(said.split("at least ")[1].split("MiB")[0]) * MIB
    for ram in (smallest, smallest + 64 * MIB):  # what plan promises, generate keeps
        seen, said = outside("generate", "--overwrite", ram=ram)
        assert seen.code == 0, said
        assert seen.peak_rss <= ram, f"{seen.peak_rss / MIB:.0f} MiB of {ram / MIB:.0f}"
