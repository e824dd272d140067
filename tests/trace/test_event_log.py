from __future__ import annotations

import threading
from itertools import pairwise

from batchgen_lite.trace.event_log import EventLog, What


def fill(log: EventLog, sweeps: int, events: int) -> None:
    for sweep in range(sweeps):
        for number in range(events):
            log.add(What.TILE, sweep + number / events, 0.5 / events, "experts", 3, number, sweep, 1 << 40)
        if sweep < sweeps - 1:
            log.new_sweep()


def test_events_come_back_as_they_went_in() -> None:
    log = EventLog()
    log.add(What.READ, 1.25, 0.5, "read", 0, 2, 0, 5 << 30)
    log.add(What.TILE, 2.0, 0.25, "experts", 47, 127, 512, 9)
    read, tile = log.events()
    assert (read.what, read.start, read.seconds, read.name, read.index, read.nbytes) == (
        What.READ,
        1.25,
        0.5,
        "read",
        2,
        5 << 30,
    )
    assert (tile.layer, tile.index, tile.tokens) == (47, 127, 512)


def test_memory_is_bounded_and_whole_sweeps_spread_over_the_run_remain() -> None:
    log = EventLog(limit_bytes=32 * 1000)
    fill(log, sweeps=1000, events=50)
    assert log.nbytes <= 32 * 1500
    kept = log.kept_sweeps
    assert kept[0] == 0
    assert kept[-1] == 999  # the newest, in which a run may have been interrupted
    steps = {after - before for before, after in pairwise(kept[:-1])}
    assert steps == {log.stride}
    per_sweep = [0] * 1000
    for event in log.events():
        per_sweep[event.tokens] += 1
    assert {count for count in per_sweep if count} == {50}  # each of them complete
    assert [sweep for sweep, count in enumerate(per_sweep) if count] == kept


def test_a_single_sweep_beyond_the_memory_is_cut_and_counted() -> None:
    log = EventLog(limit_bytes=32 * 100)
    fill(log, sweeps=1, events=80)
    assert log.dropped == 30
    assert len(list(log.events())) == 50


def test_threads_may_add_at_once() -> None:
    log = EventLog()
    threads = [threading.Thread(target=fill, args=(log, 1, 2000)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(list(log.events())) == 8000
