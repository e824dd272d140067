"""The state of a job, read from its files without disturbing whoever writes them."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from batchgen_lite.errors import UsageError
from batchgen_lite.jobs.done_table import Status
from batchgen_lite.jobs.journal import read_journal
from batchgen_lite.jobs.journal_format import Contents
from batchgen_lite.jobs.layout import JobPaths
from batchgen_lite.jobs.lock import is_held, read_status
from batchgen_lite.jobs.manifest import load_manifest


@dataclass(frozen=True, slots=True)
class JobStatus:
    """``state``: "starting" (lines are being read) | "running" | "interrupted" | "complete". ``progress``: the running
    job's own figures, at most a second or two old."""

    state: str
    total: int = 0
    done: int = 0
    failed: int = 0
    cut: int = 0
    live_rows: int = 0
    live_tokens: int = 0
    model: str = ""
    input_name: str = ""
    pid: int | None = None
    host: str | None = None
    progress: dict[str, Any] = field(default_factory=dict)

    def fields(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def read_status_of(output: str) -> JobStatus:
    """UsageError if no job has ever written ``output``."""
    paths = JobPaths(Path(os.path.realpath(output)))
    manifest = load_manifest(paths.manifest)
    live = read_status(paths.lock) if is_held(paths.lock) else None
    running = live if live is not None else {}
    holder = {"pid": running.get("pid"), "host": running.get("host"), "progress": running.get("progress") or {}}
    if manifest is None:
        if not is_held(paths.lock):
            raise UsageError(f"no job writes {output}: neither {paths.manifest.name} nor a running process is there")
        return JobStatus("starting", **holder)
    if manifest.complete and not is_held(paths.lock):
        result = manifest.result
        done = result.get("ok", 0) + result.get("failed", 0)
        figures = {"done": done, "failed": result.get("failed", 0), "cut": result.get("cut_by_length", 0)}
        return JobStatus("complete", manifest.rows, model=manifest.model, input_name=manifest.input_name, **figures)
    contents = Contents(lambda entry: True)
    contents.replay(read_journal(paths.journal))
    return JobStatus(
        "running" if is_held(paths.lock) else "interrupted",
        manifest.rows,
        len(contents.done),
        contents.done.number(Status.FAILED),
        contents.done.number(Status.CUT),
        len(contents.live),
        sum(len(row.tokens) for row in contents.live.values()),
        manifest.model,
        manifest.input_name,
        **holder,
    )
