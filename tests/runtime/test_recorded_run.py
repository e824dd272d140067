"""What a recorder hears of a run of the real engine, on a tiny checkpoint that is streamed."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from engine_runs import Prompts, random_prompts
from tiny_models import tiny_checkpoint

from batchgen_lite.runtime.build import build_engine
from batchgen_lite.runtime.interface import RunSummary
from batchgen_lite.runtime.options import EngineOptions
from batchgen_lite.runtime.planner import Overrides
from batchgen_lite.sampling_params import SamplingParams
from batchgen_lite.trace.event_log import What
from batchgen_lite.trace.recorder import SILENT, Recorder
from batchgen_lite.trace.run_recorder import RunRecorder

LENGTHS = (5, 70, 9, 30)
TOKENS = 6


def run(path: Path, recorder: Recorder) -> tuple[Prompts, RunSummary]:
    options = EngineOptions(threads=1, overrides=Overrides(resident_bytes=0))
    source = Prompts(random_prompts(LENGTHS), SamplingParams(temperature=0.0, max_tokens=TOKENS))
    engine = build_engine(path, options, recorder=recorder)
    try:
        return source, asyncio.run(engine.run(source))
    finally:
        engine.close()


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    tiny_checkpoint("qwen3_moe", path)
    return path


@pytest.fixture(scope="module")
def recorded(path: Path) -> tuple[RunRecorder, Prompts, RunSummary]:
    recorder = RunRecorder()
    return recorder, *run(path, recorder)


def test_recording_changes_no_token(recorded: tuple[RunRecorder, Prompts, RunSummary], path: Path) -> None:
    source, _ = run(path, SILENT)
    assert recorded[1].tokens == source.tokens


def test_every_token_went_to_its_experts(recorded: tuple[RunRecorder, Prompts, RunSummary]) -> None:
    recorder, _, summary = recorded
    computed = sum(LENGTHS) + len(LENGTHS) * (TOKENS - 1)
    sums = {layer: sum(row.tokens) for layer, row in recorder.experts.items()}
    top_k = sums[0] // computed
    assert top_k >= 1
    last = max(sums)
    # Of the last layer's experts only those tokens whose logits are wanted: one a token that was sampled.
    assert sums == dict.fromkeys(sums, computed * top_k) | {last: len(LENGTHS) * TOKENS * top_k}
    reads = sum(sum(row.reads) for row in recorder.experts.values())
    assert reads >= summary.expert_reads > 0


def test_the_recorder_counts_what_the_summary_counts(recorded: tuple[RunRecorder, Prompts, RunSummary]) -> None:
    recorder, _, summary = recorded
    line = recorder.timeline
    assert recorder.sweeps == summary.sweeps
    assert line.total("decoded") == pytest.approx(summary.tokens_decoded)
    assert line.total("prefilled") == pytest.approx(summary.tokens_prefilled)
    assert sum(recorder.generated_lengths.values()) == len(LENGTHS)
    assert recorder.reasons == {"length": len(LENGTHS)}
    # Asked for, without what direct reads bring along to fill their blocks.
    assert 0 < line.total("read") <= summary.bytes_read


def test_the_engines_time_adds_up(recorded: tuple[RunRecorder, Prompts, RunSummary]) -> None:
    """Parts of a sweep never exceed it; nearly all of it is accounted for by name."""
    line = recorded[0].timeline
    parts = sum(line.total(name) for name in ("experts", "attention", "projections", "head", "sampling", "waiting"))
    assert 0.5 * line.total("sweeps") < parts <= line.total("sweeps") * 1.001


def test_events_lie_within_their_sweeps(recorded: tuple[RunRecorder, Prompts, RunSummary]) -> None:
    events = list(recorded[0].log.events())
    sweeps = [(event.start, event.start + event.seconds) for event in events if event.what is What.SWEEP]
    assert len(sweeps) == recorded[0].sweeps
    inside = [event for event in events if event.what in (What.TILE, What.MODULE, What.ATTENTION, What.WAIT)]
    assert {event.what for event in inside} >= {What.TILE, What.MODULE, What.ATTENTION}
    for event in inside:
        middle = event.start + event.seconds / 2
        assert any(begin <= middle <= end for begin, end in sweeps), event


def test_the_summary_says_what_link_and_cores_did(recorded: tuple[RunRecorder, Prompts, RunSummary]) -> None:
    summary = recorded[2]
    figures = summary.measured
    assert figures["streaming_bytes_per_second"] > 0  # type: ignore[operator]
    assert 0 < figures["roofline_share"] <= 1  # type: ignore[operator]
    assert figures["computing_seconds"] + figures["waiting_seconds"] <= summary.wall_seconds + 0.01  # type: ignore[operator]
    assert "of the roofline" in summary.extra["time went"]


def test_a_second_run_of_an_engine_counts_its_own_reads(path: Path) -> None:
    options = EngineOptions(threads=1, overrides=Overrides(resident_bytes=0))
    engine = build_engine(path, options)
    params = SamplingParams(temperature=0.0, max_tokens=TOKENS)
    try:
        first, second = (asyncio.run(engine.run(Prompts(random_prompts(LENGTHS), params))) for _ in range(2))
    finally:
        engine.close()
    assert first.sweeps == second.sweeps
    assert second.bytes_read <= 1.2 * first.bytes_read
    assert second.expert_reads == first.expert_reads


def test_copies_to_a_device_have_their_lane(path: Path, recorded: tuple[RunRecorder, Prompts, RunSummary]) -> None:
    recorder = RunRecorder()
    options = EngineOptions(threads=1, device="sim", vram=64 << 20, overrides=Overrides(resident_bytes=0))
    source = Prompts(random_prompts(LENGTHS), SamplingParams(temperature=0.0, max_tokens=TOKENS))
    engine = build_engine(path, options, recorder=recorder)
    try:
        asyncio.run(engine.run(source))
    finally:
        engine.close()
    assert source.tokens == recorded[1].tokens
    assert set(recorder.budgets) == {"--ram", "--vram"}
    copies = [event for event in recorder.log.events() if event.what is What.COPY_IN]
    # An event's bytes are spread over the moments of the timeline that it lasts: sums of fractions.
    assert recorder.timeline.total("copied in") == pytest.approx(sum(event.nbytes for event in copies), rel=1e-9)
    assert copies
