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
    if manifest is None and not is_held(paths.lock):
        raise UsageError(f"no job writes {output}: neither {paths.manifest.name} nor a running process is there")
    state = _holder(paths) if is_held(paths.lock) else JobStatus("interrupted")
    if manifest is None:
        return dataclasses.replace(state, state="starting")
    state = dataclasses.replace(state, total=manifest.rows, model=manifest.model, input_name=manifest.input_name)
    if manifest.complete and state.state != "running":
        result = manifest.result
        failed, cut = result.get("failed", 0), result.get("cut_by_length", 0)
        return dataclasses.replace(state, state="complete", done=result.get("ok", 0) + failed, failed=failed, cut=cut)
    contents = Contents(lambda entry: True)
    contents.replay(read_journal(paths.journal))
    return dataclasses.replace(
        state,
        done=len(contents.done),
        failed=contents.done.number(Status.FAILED),
        cut=contents.done.number(Status.CUT),
        live_rows=len(contents.live),
        live_tokens=sum(len(row.tokens) for row in contents.live.values()),
    )


def _holder(paths: JobPaths) -> JobStatus:
    live = read_status(paths.lock) or {}
    return JobStatus("running", pid=live.get("pid"), host=live.get("host"), progress=live.get("progress") or {})
