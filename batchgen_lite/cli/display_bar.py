"""The bar on a terminal."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TextIO

from rich.console import Console
from rich.padding import Padding
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from batchgen_lite.cli.snapshot import Snapshot

_SCAN_SECONDS = 0.1


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """rich would end the process here."""
        raise BrokenPipeError


class BarDisplay:
    """done/total, rates, what bounds the run, ETA; redrawn by rich. NO_COLOR and TERM=dumb are honoured by rich."""

    def __init__(self, stream: TextIO) -> None:
        self._console = _Console(file=stream, highlight=False, soft_wrap=False)
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        self._scanned = 0.0

    def plan(self, title: str, lines: Mapping[str, str]) -> None:
        self.close()
        self._table(title, lines)

    def scanning(self, rows: int) -> None:
        now = time.monotonic()
        if now - self._scanned >= _SCAN_SECONDS:
            self._scanned = now
            self._show(f"reading the input: {rows:,} lines", 0, None)

    def note(self, text: str) -> None:
        self._console.print(Text(text, style="dim"))

    def update(self, snapshot: Snapshot) -> None:
        rows = snapshot.rows
        text = " · ".join([f"{rows.done:,}/{rows.total:,}", *snapshot.parts()])
        self._show(text, rows.done, rows.total)

    def summary(self, title: str, lines: Mapping[str, str], figures: Mapping[str, object]) -> None:
        self.close()
        self._table(title, lines)

    def close(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress, self._task = None, None

    def _show(self, text: str, done: int, total: int | None) -> None:
        if self._progress is None:
            columns = (SpinnerColumn(), BarColumn(bar_width=28), TextColumn("{task.description}"), TimeElapsedColumn())
            self._progress = Progress(*columns, console=self._console, transient=True, refresh_per_second=8)
            self._task = self._progress.add_task(text, total=total)
            self._progress.start()
        if self._task is not None:
            self._progress.update(self._task, description=text, completed=done, total=total)

    def _table(self, title: str, lines: Mapping[str, str]) -> None:
        table = Table.grid(padding=(0, 2))
        table.add_column(style="cyan", no_wrap=True)
        table.add_column(overflow="fold")
        for label, text in lines.items():
            table.add_row(Text(label), Text(text))
        self._console.print(Text(title, style="bold"))
        self._console.print(Padding(table, (0, 0, 0, 2)))
