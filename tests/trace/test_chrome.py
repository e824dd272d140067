"""The trace as its viewers read it."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from batchgen_lite.trace.chrome import write_trace
from batchgen_lite.trace.recorder import States
from batchgen_lite.trace.run_recorder import RunRecorder


class Hand:
    def __init__(self) -> None:
        self.at = 0.0

    def __call__(self) -> float:
        return self.at


@pytest.fixture
def recorder() -> RunRecorder:
    """Two sweeps: reads that overlap computing, waiting, experts, a KV move."""
    hand = Hand()
    recorder = RunRecorder(clock=hand)
    for sweep in range(2):
        recorder.sweep_begins(6, States(running=6, waiting=4 - sweep))
        begun = recorder.now()
        hand.at += 1.0
        recorder.waited(begun)
        recorder.read(begun, 1 << 20, 0)
        recorder.routed(0, [4, 2])
        for expert in range(2):
            since = recorder.now()
            hand.at += 0.5
            recorder.tile("experts", 0, expert, 1 << 19, since, resident=False)
        recorder.module("experts", 0, 6, begun)
        since = recorder.now()
        hand.at += 0.25
        recorder.slice_step("qkv", 0, 6, since)
        recorder.sweep_ends(begun, 2, 4, 6)
        recorder.kv_moved("evicted", recorder.now(), 0, 17)
        recorder.memory(1 << 28, 5)
        hand.at += 0.125
    return recorder


def events_of(trace: dict[str, Any]) -> list[dict[str, Any]]:
    return [event for event in trace["traceEvents"] if event["ph"] == "X"]


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_a_trace_has_the_lanes_and_every_event(recorder: RunRecorder, tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    write_trace(path, recorder)
    raw = path.read_bytes()
    trace = json.loads(gzip.decompress(raw) if name.endswith("gz") else raw)
    lanes = {
        event["tid"]: event["args"]["name"] for event in trace["traceEvents"] if event.get("name") == "thread_name"
    }
    assert set(lanes.values()) == {
        "sweeps",
        "between sweeps",
        "modules",
        "attention slices",
        "experts and other tiles",
        "waiting for weights",
        "disk reads",
        "KV moves",
    }
    tiles = [event for event in events_of(trace) if event["cat"] == "tile"]
    assert [(event["name"], event["args"]["tokens"]) for event in tiles] == [
        ("expert 0 L0", 4),
        ("expert 1 L0", 2),
    ] * 2
    assert tiles[0]["ts"] == pytest.approx(1.0e6)
    assert tiles[0]["dur"] == pytest.approx(0.5e6)
    counters = {event["name"] for event in trace["traceEvents"] if event["ph"] == "C"}
    assert counters >= {"rows", "batch (tokens)", "memory (bytes)", "reading (bytes/s)"}
    assert trace["otherData"]["sweeps"] == 2
    assert list(tmp_path.iterdir()) == [path]


def test_no_two_events_of_a_lane_overlap(recorder: RunRecorder, tmp_path: Path) -> None:
    """Viewers draw what overlaps within a thread as nested, or not at all."""
    recorder.copied(0.0, 5, inward=True)
    recorder.copied(0.1, 5, inward=True)  # two copies at the same time
    path = tmp_path / "trace.json"
    write_trace(path, recorder)
    ends: dict[int, float] = {}
    events = events_of(json.loads(path.read_text()))
    for event in events:
        assert event["ts"] >= ends.get(event["tid"], 0.0) - 1.0
        ends[event["tid"]] = event["ts"] + event["dur"]
    assert len({event["tid"] for event in events if event["cat"] == "copy_in"}) == 2


def test_a_trace_that_cannot_be_completed_leaves_the_old_one(
    recorder: RunRecorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "trace.json"
    path.write_text("old")

    def full(_: object) -> object:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("batchgen_lite.trace.chrome.trace_events", full)
    with pytest.raises(OSError, match="No space"):
        write_trace(path, recorder)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
