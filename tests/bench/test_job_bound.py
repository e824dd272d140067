"""The least time of a job: bytes and operations counted by hand, the longer of the two."""

from __future__ import annotations

from pathlib import Path

import pytest
from job_bound import job_bound, machine_rates
from make_checkpoint import Shape, write_checkpoint

from batchgen_lite.models.load import LoadedModel, load_model

SHAPE = Shape(layers=2, hidden=64, heads=2, kv_heads=1, head_dim=32, experts=4, top_k=2, width=32, vocab=500)
SUMMARY = {
    "bytes_read": 10_000_000,
    "unrouted_expert_reads": 3,
    "tokens_prefilled": 100,
    "tokens_decoded": 50,
    "ok": 10,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    path = tmp_path_factory.mktemp("bound") / "model"
    write_checkpoint(path, SHAPE)
    return load_model(path)


def test_bytes_and_operations_are_those_that_had_to_be(model: LoadedModel) -> None:
    bound = job_bound(model, SUMMARY, read_rate=1e6, flops=1e9)
    expert = 3 * 64 * 32  # weights
    attention = 64 * (64 + 2 * 32) + 64 * 64
    router = 4 * 64
    a_token = 2 * 2 * (attention + router + 2 * expert)  # two layers, two operations a weight, two experts
    behind_last_attention = 2 * (64 * 64 + router + 2 * expert)  # for the 90 tokens whose logits nobody wants
    assert bound.flop == 140 * a_token - 90 * behind_last_attention + 50 * 2 * 500 * 64
    # An expert lies in memory in whole blocks of its reads, so a little more than its weights.
    wasted = SUMMARY["bytes_read"] - bound.bytes
    assert 3 * 2 * expert <= wasted <= 3 * (2 * expert + 3 * 8192)
    assert bound.reading_seconds == pytest.approx(bound.bytes / 1e6)
    assert bound.computing_seconds == pytest.approx(bound.flop / 1e9)


@pytest.mark.parametrize(("read_rate", "flops", "bound_by"), [(1e3, 1e12, "reading"), (1e12, 1e3, "computing")])
def test_the_slower_resource_bounds(model: LoadedModel, read_rate: float, flops: float, bound_by: str) -> None:
    bound = job_bound(model, SUMMARY, read_rate, flops)
    assert bound.seconds == getattr(bound, f"{bound_by}_seconds")


def test_a_summary_without_a_figure_is_refused(model: LoadedModel) -> None:
    with pytest.raises(TypeError, match="bytes_read of the summary is None"):
        job_bound(model, SUMMARY | {"bytes_read": None}, 1.0, 1.0)


def test_rates_come_from_this_machine(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "model", Shape(layers=2, hidden=512, experts=16, width=512, vocab=4000))
    read_rate, flops = machine_rates(load_model(tmp_path / "model"), threads=1)
    assert read_rate > 0
    assert flops > 0
