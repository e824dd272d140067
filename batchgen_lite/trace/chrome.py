"""A recorder's content in the trace format of Chrome, for ui.perfetto.dev or chrome://tracing.

Format: "Trace Event Format" (the Chromium project's document of that name): a JSON object whose ``traceEvents`` are
complete events ("ph": "X", microseconds), counters ("C") and names ("M"). Lanes are threads of one process; lanes whose
events can overlap get as many threads as they need.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from batchgen_lite import __version__
from batchgen_lite.trace.atomic_file import replaced
from batchgen_lite.trace.event_log import Event, What
from batchgen_lite.trace.run_recorder import RunRecorder

LANES = {
    What.SWEEP: "sweeps",
    What.BETWEEN: "between sweeps",
    What.MODULE: "modules",
    What.ATTENTION: "attention slices",
    What.TILE: "experts and other tiles",
    What.WAIT: "waiting for weights",
    What.READ: "disk reads",
    What.COPY_IN: "host to device",
    What.COPY_OUT: "device to host",
    What.KV: "KV moves",
}
"""In the order in which they are shown."""

COUNTERS = {
    "rows": ("running", "held", "evicted"),
    "batch (tokens)": ("tokens",),
    "memory (bytes)": ("memory",),
    "KV pages": ("kv pages",),
}
RATES = {"reading (bytes/s)": "read", "decoding (tokens/s)": "decoded"}
_PER_LANE = 100  # thread numbers a lane has for itself
_PROCESS = 1


def write_trace(path: Path, recorder: RunRecorder) -> None:
    """Write ``path`` (.json, or .json.gz packed); it is there complete or not at all. Raises OSError."""
    with replaced(path) as file:
        if path.suffix == ".gz":
            with gzip.GzipFile(fileobj=file, mode="wb", compresslevel=5) as packed:
                packed.writelines(_pieces(recorder))
        else:
            file.writelines(_pieces(recorder))


def _pieces(recorder: RunRecorder) -> Iterator[bytes]:
    """The file, event by event: the whole would take ten times the recorder's memory."""
    head = {"displayTimeUnit": "ms", "otherData": _metadata(recorder)}
    yield json.dumps(head)[:-1].encode() + b', "traceEvents": [\n'
    for number, event in enumerate(trace_events(recorder)):
        yield (b",\n" if number else b"") + json.dumps(event, separators=(",", ":")).encode()
    yield b"\n]}\n"


def _metadata(recorder: RunRecorder) -> dict[str, Any]:
    log = recorder.log
    kept = len(log.kept_sweeps) - 1
    return {
        "program": f"batchgen-lite {__version__}",
        "sweeps": recorder.sweeps,
        "detail": "all sweeps" if log.stride == 1 else f"{kept} sweeps, every {log.stride}th, and the newest",
        "events_left_out_of_long_sweeps": log.dropped,
    }


def trace_events(recorder: RunRecorder) -> Iterator[dict[str, Any]]:
    """All of the trace: names of lanes, events, counters."""
    yield _name("process_name", 0, "batchgen-lite")
    used: dict[What, list[float]] = {what: [] for what in LANES}  # per thread of a lane: where its last event ends
    order = {what: (number + 1) * _PER_LANE for number, what in enumerate(LANES)}
    for event in recorder.log.events():
        yield _complete(event, order[event.what] + _thread(used[event.what], event))
    for what, ends in used.items():
        for number in range(len(ends)):
            name = LANES[what] if number == 0 else f"{LANES[what]} ({number + 1})"
            yield _name("thread_name", order[what] + number, name)
            yield _name("thread_sort_index", order[what] + number, order[what] + number)
    yield from _counters(recorder)


def _thread(ends: list[float], event: Event) -> int:
    """The first of a lane's threads that is free when the event begins; overlapping events must not share one."""
    rounding = 1e-6 + 1e-6 * event.seconds  # durations are kept in single precision
    for number, end in enumerate(ends):
        if event.start >= end - rounding:
            ends[number] = event.start + event.seconds
            return number
    if len(ends) < _PER_LANE:
        ends.append(0.0)
    ends[-1] = event.start + event.seconds
    return len(ends) - 1


def _complete(event: Event, thread: int) -> dict[str, Any]:
    name = event.name
    arguments: dict[str, int] = {}
    if event.what in (What.MODULE, What.ATTENTION, What.TILE) and event.layer >= 0:
        name = f"{name} L{event.layer}"
        arguments["layer"] = event.layer
    if event.what is What.TILE and event.index >= 0:
        name = f"expert {event.index} L{event.layer}"
        arguments["expert"] = event.index
    if event.what is What.READ:
        arguments["file"] = event.index
    if event.what is What.KV:
        arguments["row"] = event.index
    if event.what is What.SWEEP:
        arguments["sequences"] = event.index
    if event.tokens:
        arguments["tokens"] = event.tokens
    if event.nbytes:
        arguments["bytes"] = event.nbytes
    return {
        "name": name,
        "cat": event.what.name.lower(),
        "ph": "X",
        "pid": _PROCESS,
        "tid": thread,
        "ts": round(event.start * 1e6, 3),
        "dur": round(event.seconds * 1e6, 3),
        "args": arguments,
    }


def _counters(recorder: RunRecorder) -> Iterator[dict[str, Any]]:
    """Levels and rates over the whole run, whichever sweeps are kept."""
    line = recorder.timeline
    levels = {name: line.level(name) for names in COUNTERS.values() for name in names}
    flows = {name: line.flow(name) for name in RATES.values()}
    for slot, start in enumerate(line.starts()):
        for title, names in COUNTERS.items():
            yield _counter(title, start, {name: round(levels[name][slot], 3) for name in names})
        for title, name in RATES.items():
            yield _counter(title, start, {name: round(flows[name][slot] / line.width, 3)})


def _counter(title: str, start: float, values: dict[str, float]) -> dict[str, Any]:
    return {"name": title, "ph": "C", "pid": _PROCESS, "ts": round(start * 1e6, 3), "args": values}


def _name(kind: str, thread: int, name: str | int) -> dict[str, Any]:
    key = "sort_index" if kind == "thread_sort_index" else "name"
    return {"name": kind, "ph": "M", "pid": _PROCESS, "tid": thread, "args": {key: name}}
