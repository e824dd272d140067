"""The recorder with a clock that tests move."""

from __future__ import annotations

import tracemalloc

import pytest

from batchgen_lite.trace.event_log import LIMIT_BYTES, EventLog, What
from batchgen_lite.trace.recorder import SILENT, States
from batchgen_lite.trace.run_recorder import RunRecorder, bin_end, length_bin


class Hand:
    def __init__(self) -> None:
        self.at = 100.0

    def __call__(self) -> float:
        return self.at


@pytest.fixture
def hand() -> Hand:
    return Hand()


@pytest.fixture
def recorder(hand: Hand) -> RunRecorder:
    return RunRecorder(clock=hand)


def test_a_modules_time_is_split_into_waiting_and_computing(recorder: RunRecorder, hand: Hand) -> None:
    recorder.sweep_begins(8, States(running=8))
    begun = recorder.now()
    hand.at += 2.0
    recorder.waited(begun)
    hand.at += 1.0
    recorder.module("experts", 0, 8, begun)
    begun = recorder.now()
    hand.at += 0.5
    recorder.module("qkv", 1, 8, begun)
    recorder.sweep_ends(0.0, 0, 8, 8)
    line = recorder.timeline
    assert line.total("waiting") == pytest.approx(2.0)
    assert line.total("experts") == pytest.approx(1.0)
    assert line.total("projections") == pytest.approx(0.5)
    assert line.total("sweeps") == pytest.approx(3.5)
    assert line.total("decoded") == pytest.approx(8)


def test_the_time_between_two_runs_is_not_the_engines(recorder: RunRecorder, hand: Hand) -> None:
    for _ in range(2):
        for _ in range(2):
            recorder.sweep_begins(8, States(running=8))
            recorder.sweep_ends(recorder.now(), 0, 8, 8)
            hand.at += 1.0
        recorder.run_ends()
        hand.at += 100.0
    assert recorder.timeline.total("between sweeps") == pytest.approx(2.0)


def test_queued_reads_share_the_link_one_after_the_other(recorder: RunRecorder, hand: Hand) -> None:
    """Two submissions at once, done after 1 s and 3 s: the link was busy for 3 s, not 4."""
    first, second = recorder.now(), recorder.now()
    hand.at += 1.0
    recorder.read(first, 100, 0)
    hand.at += 2.0
    recorder.read(second, 200, 1)
    assert recorder.timeline.total("link busy") == pytest.approx(3.0)
    assert recorder.timeline.total("read") == 300
    reads = [event for event in recorder.log.events() if event.what is What.READ]
    assert [(event.start, event.seconds) for event in reads] == [(0.0, pytest.approx(1.0)), (1.0, pytest.approx(2.0))]


def test_experts_count_tokens_and_reads(recorder: RunRecorder) -> None:
    recorder.routed(4, [0, 3, 5])
    recorder.routed(4, [1, 0, 2])
    recorder.submitted(4, 2, 10)
    recorder.submitted(4, -1, 10)  # another part of the same expert
    recorder.tile("experts", 4, 2, 10, 0.0, resident=True)
    assert recorder.experts[4].tokens == [1, 3, 7]
    assert recorder.experts[4].reads == [0, 0, 1]
    tile = next(event for event in recorder.log.events() if event.what is What.TILE)
    assert (tile.index, tile.tokens) == (2, 2)
    assert recorder.timeline.total("resident") == 10


def test_time_between_sweeps_is_the_runs_own(recorder: RunRecorder, hand: Hand) -> None:
    recorder.sweep_begins(1, States())
    since = recorder.now()
    hand.at += 1.0
    recorder.sweep_ends(since, 1, 0, 1)
    hand.at += 0.25
    recorder.sweep_begins(1, States())
    assert recorder.timeline.total("between sweeps") == pytest.approx(0.25)


@pytest.mark.parametrize("length", [0, 1, 7, 8, 9, 15, 16, 17, 100, 4096, 131072])
def test_length_bins_cover_every_length_once(length: int) -> None:
    number = length_bin(length)
    assert length <= bin_end(number)
    assert number == 0 or length > bin_end(number - 1)


@pytest.mark.parametrize(("sweeps", "tiles"), [(8_000, 1), (60, 1_000), (1, 40_000)])
def test_a_recorder_holds_no_more_than_it_says(sweeps: int, tiles: int) -> None:
    """Whatever the run is like: many small sweeps, large ones, one beyond all measure."""
    tracemalloc.start()
    try:
        recorder = RunRecorder(EventLog(limit_bytes=1 << 20))
        for _ in range(sweeps):
            recorder.sweep_begins(8, States(running=8))
            since = recorder.now()
            for number in range(tiles):
                recorder.tile("experts", number % 64, number % 512, 1 << 20, recorder.now(), resident=True)
            recorder.sweep_ends(since, 0, 8, 8)
            recorder.finished(number, 30, "stop")
        recorder.routed(63, [1] * 512)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak <= recorder.memory_bytes - (LIMIT_BYTES - (1 << 20)) * 3 // 2
    assert recorder.sweeps == sweeps


def test_a_silent_recorder_takes_everything(recorder: RunRecorder) -> None:
    assert not SILENT.active
    since = SILENT.now()
    SILENT.read(since, 1, 0)
    SILENT.tile("experts", 0, 0, 1, since, resident=False)
    SILENT.sweep_begins(1, States())
    SILENT.sweep_ends(since, 0, 1, 1)
    assert {name for name in vars(RunRecorder) if not name.startswith("_")} <= set(dir(SILENT)) | {"active"}
