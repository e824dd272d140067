"""The right to write an output, taken before anything slow: names checked, lock held, and whether to start or go on."""

from __future__ import annotations

import datetime
import enum
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from batchgen_lite.errors import OutputExistsError, StorageError, UsageError
from batchgen_lite.jobs.layout import JobPaths, job_paths
from batchgen_lite.jobs.lock import JobLock
from batchgen_lite.jobs.manifest import Manifest, load_manifest


class Start(enum.Enum):
    """How a run begins."""

    FRESH = "from the first line"
    RESUME = "where an interrupted run stopped"
    REOPEN = "from a complete output, whose records stay as they are"


@dataclass(slots=True)
class Claim:
    """Held from ``claim_output`` to ``release``. ``manifest`` is that of the job to go on with, None when FRESH.
    ``scratch``: the job's files are temporary, because its output is standard output."""

    paths: JobPaths
    lock: JobLock
    start: Start
    manifest: Manifest | None = None
    scratch: Path | None = None
    expendable: bool = False
    """The unfinished job's files, if there are any, hold nothing that is not elsewhere too."""

    def release(self) -> None:
        self.lock.release()
        if self.scratch is not None:
            shutil.rmtree(self.scratch, ignore_errors=True)

    def job_date(self, wanted: str | None) -> str:
        """The job's date, YYYY-MM-DD: fixed once, so that templates which print it, and records, stay the same."""
        if wanted is not None:
            try:
                return datetime.date.fromisoformat(wanted).isoformat()
            except ValueError:
                raise UsageError(f"--date is {wanted!r}: it must be a date like 2026-01-31") from None
        if self.manifest is not None:
            return self.manifest.date
        return datetime.date.today().isoformat()


def claim_output(output: str, source: str, *, resume: bool = False, overwrite: bool = False) -> Claim:
    """Take the output. OutputExistsError if it or an unfinished run is there and neither flag says what to do with it;
    UsageError if it cannot be an output, or another run is writing it."""
    if resume and overwrite:
        raise UsageError("--resume and --overwrite contradict each other; give one of them")
    if output == "-":
        if resume:
            raise UsageError("--resume needs an --output file: nothing is kept of a run to standard output")
        scratch = Path(tempfile.mkdtemp(prefix="batchgen-lite-"))
        paths = JobPaths(scratch / "stdout.jsonl")
        return Claim(paths, JobLock(paths.lock), Start.FRESH, scratch=scratch, expendable=True)
    paths = job_paths(output, source)
    lock = JobLock(paths.lock)
    try:
        start, manifest = _decide(paths, resume, overwrite)
    except BaseException:
        lock.release()
        raise
    expendable = start is Start.REOPEN or (start is Start.FRESH and not _has_content(paths))
    return Claim(paths, lock, start, manifest, expendable=expendable)


def _decide(paths: JobPaths, resume: bool, overwrite: bool) -> tuple[Start, Manifest | None]:
    finished, unfinished = paths.output.exists(), _has_content(paths)
    if overwrite or not (finished or unfinished):
        return Start.FRESH, None
    if not resume:
        what = "an unfinished run of it" if unfinished else f"{paths.output.name}"
        raise OutputExistsError(
            f"{what} exists in {paths.output.parent}: --resume goes on with it, --overwrite starts again"
        )
    manifest = load_manifest(paths.manifest)
    if manifest is None:
        raise UsageError(
            f"--resume: {paths.manifest.name} is missing, so nothing says what the job was; "
            "choose another --output, or start again with --overwrite"
        )
    if manifest.complete and finished:
        return Start.REOPEN, manifest
    if manifest.complete or not unfinished:
        raise UsageError(
            f"--resume: {paths.manifest.name} is there but its records are not; start again with --overwrite"
        )
    return Start.RESUME, manifest


def _has_content(paths: JobPaths) -> bool:
    """True if an earlier run left work. A kill before the manifest was written leaves none."""
    try:
        if paths.manifest.exists():
            manifest = load_manifest(paths.manifest)
            return manifest is not None and not manifest.complete
        return paths.partial.exists() and os.path.getsize(paths.partial) > 0
    except UsageError:
        return True  # not ours, or damaged: nothing to be overwritten silently
    except OSError as error:
        raise StorageError(f"cannot look at {paths.partial}: {error.strerror}") from error
