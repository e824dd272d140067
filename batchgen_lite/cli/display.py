"""How a run is shown: a bar on a terminal, a line now and then elsewhere, JSON for machines. All on standard error."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Protocol, TextIO

from batchgen_lite.cli.snapshot import Snapshot

KINDS = ("auto", "bar", "plain", "json", "none")

PLAIN_SECONDS = 10.0
JSON_SECONDS = 1.0


class Display(Protocol):
    """Shows one run. ``plan`` comes once, first; ``update`` often (displays choose how often they show it)."""

    def plan(self, title: str, lines: Mapping[str, str]) -> None: ...
    def scanning(self, rows: int) -> None:
        """The first pass has come this far."""
        ...

    def note(self, text: str) -> None: ...
    def update(self, snapshot: Snapshot) -> None: ...
    def summary(self, title: str, lines: Mapping[str, str], figures: Mapping[str, object]) -> None: ...
    def close(self) -> None:
        """Leave the terminal as it was; idempotent."""
        ...


def make_display(kind: str, stream: TextIO | None = None) -> Display:
    """``auto`` is a bar on a terminal and plain lines elsewhere. Whoever stops reading (a closed terminal, a log reader
    that died) does not end the run: the display goes silent."""
    stream = stream or sys.stderr
    if kind == "none":
        return SilentDisplay()
    return GuardedDisplay(_open(kind, stream), stream)


def _open(kind: str, stream: TextIO) -> Display:
    if kind == "bar" or (kind == "auto" and stream.isatty()):
        from batchgen_lite.cli.display_bar import BarDisplay

        return BarDisplay(stream)
    return JsonDisplay(stream) if kind == "json" else PlainDisplay(stream)


class GuardedDisplay:
    """Passes everything on, until the stream fails."""

    def __init__(self, display: Display, stream: TextIO) -> None:
        self._display = display
        self._stream = stream

    def plan(self, title: str, lines: Mapping[str, str]) -> None:
        with self._guarded():
            self._display.plan(title, lines)

    def scanning(self, rows: int) -> None:
        with self._guarded():
            self._display.scanning(rows)

    def note(self, text: str) -> None:
        with self._guarded():
            self._display.note(text)

    def update(self, snapshot: Snapshot) -> None:
        with self._guarded():
            self._display.update(snapshot)

    def summary(self, title: str, lines: Mapping[str, str], figures: Mapping[str, object]) -> None:
        with self._guarded():
            self._display.summary(title, lines, figures)

    def close(self) -> None:
        with self._guarded():
            self._display.close()

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        try:
            yield
        except OSError:
            self._display = SilentDisplay()
            # What is stuck in the stream's buffer would fail again at exit, and change the exit code there.
            with contextlib.suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())


class SilentDisplay:
    """Shows nothing; errors are not a display's business."""

    def plan(self, title: str, lines: Mapping[str, str]) -> None: ...
    def scanning(self, rows: int) -> None: ...
    def note(self, text: str) -> None: ...
    def update(self, snapshot: Snapshot) -> None: ...
    def summary(self, title: str, lines: Mapping[str, str], figures: Mapping[str, object]) -> None: ...
    def close(self) -> None: ...


class PlainDisplay:
    """Lines for log files: one every ten seconds."""

    def __init__(self, stream: TextIO, seconds: float = PLAIN_SECONDS) -> None:
        self._stream = stream
        self._seconds = seconds
        self._shown = time.monotonic()

    def plan(self, title: str, lines: Mapping[str, str]) -> None:
        self._block(title, lines)

    def scanning(self, rows: int) -> None:
        if self._due():
            self._line(f"reading the input: {rows:,} lines")

    def note(self, text: str) -> None:
        self._line(text)

    def update(self, snapshot: Snapshot) -> None:
        if self._due():
            rows = snapshot.rows
            self._line(", ".join([f"{rows.done:,}/{rows.total:,} rows", *snapshot.parts()]))

    def summary(self, title: str, lines: Mapping[str, str], figures: Mapping[str, object]) -> None:
        self._block(title, lines)

    def close(self) -> None: ...

    def _due(self) -> bool:
        now = time.monotonic()
        if now - self._shown < self._seconds:
            return False
        self._shown = now
        return True

    def _block(self, title: str, lines: Mapping[str, str]) -> None:
        width = max(map(len, lines), default=0)
        self._line("\n".join([title, *(f"  {label:<{width}}  {text}" for label, text in lines.items())]))

    def _line(self, text: str) -> None:
        print(text, file=self._stream, flush=True)


class JsonDisplay:
    """One JSON object a line, ``event`` saying which: plan, scanning, note, progress, summary."""

    def __init__(self, stream: TextIO, seconds: float = JSON_SECONDS) -> None:
        self._stream = stream
        self._seconds = seconds
        self._shown = -seconds

    def plan(self, title: str, lines: Mapping[str, str]) -> None:
        self._event("plan", {"title": title, "plan": dict(lines)})

    def scanning(self, rows: int) -> None:
        if self._due():
            self._event("scanning", {"rows": rows})

    def note(self, text: str) -> None:
        self._event("note", {"text": text})

    def update(self, snapshot: Snapshot) -> None:
        if self._due():
            self._event("progress", snapshot.fields())

    def summary(self, title: str, lines: Mapping[str, str], figures: Mapping[str, object]) -> None:
        self._event("summary", {"title": title, **figures})

    def close(self) -> None: ...

    def _due(self) -> bool:
        now = time.monotonic()
        if now - self._shown < self._seconds:
            return False
        self._shown = now
        return True

    def _event(self, kind: str, values: Mapping[str, object]) -> None:
        print(json.dumps({"event": kind, "time": round(time.time(), 3), **values}), file=self._stream, flush=True)
