"""Running jobs over the stub engine, in this process or through the real command."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from batchgen_lite.jobs.byte_text import ByteText
from batchgen_lite.jobs.claim import claim_output
from batchgen_lite.jobs.job import Counts, Job, JobOptions
from batchgen_lite.runtime.interface import Engine
from batchgen_lite.runtime.stub import StubEngine, StubOptions


def write_lines(path: Path, *lines: object) -> Path:
    """A JSONL file; bytes are written as they are, everything else as JSON."""
    path.write_bytes(
        b"".join((line if isinstance(line, bytes) else json.dumps(line).encode()) + b"\n" for line in lines)
    )
    return path


def read_records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def run_job(
    source: Path,
    output: Path,
    *,
    engine: Engine | None = None,
    context: int = 4096,
    resume: bool = False,
    overwrite: bool = False,
    **options: Any,
) -> Counts:
    """One run, from claim to close. Whatever the run raises passes through, after the job is closed."""
    options = {"seed": 7, "date": "2026-01-31", **options}
    claim = claim_output(str(output), str(source), resume=resume, overwrite=overwrite)
    job = Job(claim, JobOptions(str(source), **options), ByteText(max_positions=context))
    try:
        job.prepare()
        asyncio.run(job.run(engine or StubEngine(StubOptions())))
        return job.finish()
    finally:
        job.close()


def command(*arguments: str | Path) -> list[str]:
    """The real command, in this environment's Python. -P: the repository is no place to import from."""
    return [sys.executable, "-P", "-m", "batchgen_lite", *map(str, arguments)]


def environment(stub: dict[str, Any] | None = None, **more: str) -> dict[str, str]:
    """For a process that runs the stub engine. Nothing of the caller's own settings gets through."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("BATCHGEN_")}
    return {**kept, "BATCHGEN_ENGINE": "stub", "BATCHGEN_STUB": json.dumps(stub or {}), **more}


def run_command(
    *arguments: str | Path, stub: dict[str, Any] | None = None, stdin: bytes = b"", **more: str
) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        command(*arguments), env=environment(stub, **more), input=stdin, capture_output=True, timeout=300, check=False
    )
