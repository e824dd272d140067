"""Runs whose KV goes to the spill file and back: the same bits as without, whatever happens to the file."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engine_runs import Result, random_prompts, run_engine
from equality import assert_same_bits
from tiny_models import tiny_checkpoint

from batchgen_lite.errors import StorageError
from batchgen_lite.offload.spill import Spill
from batchgen_lite.offload.spill_file import SpillFile, SpillOptions
from batchgen_lite.runtime.migration import MigrationChoice, Tier

LENGTHS, TOKENS = (60, 61, 62, 63, 50, 120), 80
TIGHT = {"kv_pages": 8, "token_budget": 64}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {family: tmp_path_factory.mktemp(family) for family in ("llama", "deepseek_v2")}
    for family, path in made.items():
        tiny_checkpoint(family, path)
    return made


@pytest.fixture(scope="module")
def usual(models: dict[str, Path]) -> Result:
    """With room for everybody: nobody sits out."""
    return run_engine(models["llama"], random_prompts(LENGTHS), TOKENS, keep_logits=True)


@pytest.fixture(autouse=True)
def _always_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tiny model computes again in no time, so the cost model would never spill."""

    def choose(self: MigrationChoice, positions: int, free: dict[Tier, int], *_: Any) -> Tier | None:
        return Tier.DISK if 0 < -(-positions // 64) <= free.get(Tier.DISK, 0) else None

    monkeypatch.setattr(MigrationChoice, "choose", choose)


def spilling(path: Path, folder: Path, **more: Any) -> Result:
    return run_engine(
        path, random_prompts(LENGTHS), TOKENS, keep_logits=True, spill=SpillOptions(folder), **TIGHT | more
    )


@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_spilled_and_restored_runs_have_the_same_bits(
    device: str, models: dict[str, Path], usual: Result, tmp_path: Path
) -> None:
    got = spilling(models["llama"], tmp_path, device=device)
    assert_same_bits(usual, got)
    line = got.summary.extra["KV spill"]
    assert not line.startswith("0 pauses")
    assert "computed again" not in line
    assert ", 0 evictions" in got.summary.extra["batch"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kv_dtype", ["int8", "bfloat16"])
def test_latent_caches_and_other_dtypes_spill_too(kv_dtype: str, models: dict[str, Path], tmp_path: Path) -> None:
    prompts = random_prompts(LENGTHS)
    usual = run_engine(models["deepseek_v2"], prompts, TOKENS, keep_logits=True, kv_dtype=kv_dtype)
    got = spilling(models["deepseek_v2"], tmp_path, kv_dtype=kv_dtype)
    assert_same_bits(usual, got)
    assert not got.summary.extra["KV spill"].startswith("0 pauses")


def test_a_device_of_its_own_holds_kv_on_the_host_first_and_then_on_the_disk(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def choose(self: MigrationChoice, positions: int, free: dict[Tier, int], *_: Any) -> Tier | None:
        assert [state.tier for state in self.tiers] == [Tier.HOST, Tier.DISK]
        pages = -(-positions // 64)
        return Tier.HOST if free[Tier.HOST] >= pages else Tier.DISK

    monkeypatch.setattr(MigrationChoice, "choose", choose)
    prompts, tight = random_prompts((60, 61, 62, 63, 50, 120, 90, 80)), {"kv_pages": 9, "token_budget": 64}
    usual = run_engine(models["llama"], prompts, 100, keep_logits=True, device="sim")
    for held, labels in ((20, {"KV held"}), (2, {"KV held", "KV spill"})):
        got = run_engine(
            models["llama"],
            prompts,
            100,
            keep_logits=True,
            device="sim",
            spill=SpillOptions(tmp_path),
            held_pages=held,
            **tight,
        )
        assert_same_bits(usual, got)
        used = {
            label for label, line in got.summary.extra.items() if label.startswith("KV ") and not line.startswith("0 ")
        }
        assert used == labels
        assert ", 0 evictions" in got.summary.extra["batch"]
        assert dict(got.plan.accounts)["held KV"] > 0


def fail_after(writes: int, number: int) -> Callable[[SpillFile, memoryview, int], None]:
    original, count = SpillFile._write_all, [0]

    def write(self: SpillFile, record: memoryview, offset: int) -> None:
        count[0] += 1
        if count[0] > writes:
            raise OSError(number, os.strerror(number))
        original(self, record, offset)

    return write


@pytest.mark.parametrize(
    ("number", "words"), [(errno.ENOSPC, "No space left on device"), (errno.EIO, "Input/output error")]
)
@pytest.mark.parametrize("writes", [0, 1])
def test_a_disk_that_takes_no_more_means_computing_again_and_saying_so(
    writes: int,
    number: int,
    words: str,
    models: dict[str, Path],
    usual: Result,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(SpillFile, "_write_all", fail_after(writes, number))
    got = spilling(models["llama"], tmp_path)
    assert_same_bits(usual, got)
    assert words in got.summary.extra["KV spill"]
    assert "computed again" in got.summary.extra["KV spill"]
    assert ", 0 evictions" not in got.summary.extra["batch"]


def swap_records(spill: Spill) -> None:
    size = spill.store.slot_bytes
    data = spill.store.path.read_bytes()
    spill.store.path.write_bytes(data[size : 2 * size] + data[:size] + data[2 * size :])


def damage_everything(spill: Spill) -> None:
    spill.store.path.write_bytes(bytes(byte ^ 16 for byte in spill.store.path.read_bytes()))


@pytest.mark.parametrize("harm", [swap_records, damage_everything])
def test_harmed_pages_are_found_and_computed_again(
    harm: Callable[[Spill], None],
    models: dict[str, Path],
    usual: Result,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Somebody's hand is in the file before each restore."""
    restore = Spill.restore

    def harmed(self: Spill, sequence: int, pages: Any) -> bool:
        harm(self)
        return restore(self, sequence, pages)

    monkeypatch.setattr(Spill, "restore", harmed)
    got = spilling(models["llama"], tmp_path)
    assert_same_bits(usual, got)
    assert "a spilled page was not what had been written" in got.summary.extra["KV spill"]
    assert ", 0 evictions" not in got.summary.extra["batch"]


def test_limits_of_file_and_wear_are_kept(models: dict[str, Path], usual: Result, tmp_path: Path) -> None:
    for options in (SpillOptions(tmp_path, disk=1), SpillOptions(tmp_path, write_limit=40_000)):
        got = run_engine(models["llama"], random_prompts(LENGTHS), TOKENS, keep_logits=True, spill=options, **TIGHT)
        assert_same_bits(usual, got)
        assert ", 0 evictions" not in got.summary.extra["batch"]


def test_a_spill_directory_that_cannot_be_used_is_said_at_once(models: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="cannot use the spill directory"):
        run_engine(models["llama"], random_prompts([5]), 1, spill=SpillOptions(tmp_path / "file"))
