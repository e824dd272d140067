"""One batch job, from claimed output to finished file.

    claim_output -> Job.prepare (scan, manifest, settle) -> Job.run (engine) -> Job.finish (order, rename)

Each step may be the last: whatever it has done stays, and ``--resume`` goes on behind it.
"""

from __future__ import annotations

import asyncio
import calendar
import datetime
import secrets
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from batchgen_lite import __version__
from batchgen_lite.errors import StorageError, UsageError
from batchgen_lite.jobs.assemble import assemble, index_output
from batchgen_lite.jobs.claim import Claim, Start
from batchgen_lite.jobs.done_table import DoneTable, Status
from batchgen_lite.jobs.manifest import Manifest, refuse_another_job
from batchgen_lite.jobs.prepare import Preparer, Settings
from batchgen_lite.jobs.row_text import TextModel
from batchgen_lite.jobs.scan import RowReader, Scan, scan_input
from batchgen_lite.jobs.sink import ResultSink
from batchgen_lite.jobs.source import JobSource
from batchgen_lite.jobs.staging import open_input
from batchgen_lite.runtime.interface import Engine, RunSummary
from batchgen_lite.sampling_mapping import GENERATION_CONFIG_FIELDS


@dataclass(frozen=True, slots=True)
class JobOptions:
    """What the user asked of a job. ``sampling``: flags by canonical name; ``seed`` None draws one;
    ``engine_identity``: whatever else decides bits (dtypes, device), for the manifest."""

    input: str
    sampling: Mapping[str, Any] = field(default_factory=dict)
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    engine_identity: Mapping[str, str] = field(default_factory=dict)
    seed: int | None = None
    date: str | None = None
    limit: int | None = None
    on_long: str = "error"
    unordered: bool = False
    retry_errors: bool = False
    max_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Counts:
    """Rows by state. ``failed`` and ``cut`` (by length) are among ``done``."""

    total: int
    done: int
    failed: int
    cut: int

    @property
    def ok(self) -> int:
        return self.done - self.failed

    @property
    def left(self) -> int:
        return self.total - self.done


class Job:
    """Owns the claim from construction on; ``close`` gives everything up, in whatever state."""

    def __init__(self, claim: Claim, options: JobOptions, text: TextModel) -> None:
        self.claim = claim
        self.options = options
        self.text = text
        self.date = claim.job_date(options.date)
        self.base_seed = self._choose_seed()
        self.scan: Scan | None = None
        self.sink: ResultSink | None = None
        self.source: JobSource | None = None
        self.manifest: Manifest | None = None
        self.resumed_rows = 0
        self._settled = 0
        self._complete_already = False

    def prepare(self, observe: Callable[[int], object] = lambda row: None) -> None:
        """Check and index the input, compare or write the manifest, write the records that need no engine.
        ``observe`` sees each row's number as it is read. UsageError, StorageError."""
        settings = Settings(self.base_seed, self.options.sampling, self.options.template_kwargs, self.options.on_long)
        reader = RowReader(Preparer(settings, self.text))
        staged = self.claim.paths.staged
        path = open_input(self.options.input, staged, resume=self.claim.start is Start.RESUME)
        done = self._open_results()
        self.resumed_rows = len(done)
        scan = self.scan = scan_input(path, reader, limit=self.options.limit, done=done, observe=observe)
        self._settle_manifest(scan)
        if self._complete_already:
            return
        sink = self._sink()
        self.source = JobSource(scan.rows, reader, sink, model=self.text.name, created=_midnight(self.date))
        self.source.settle()
        self._settled = len(sink.journal.done)
        sink.flush()
        self._raise_fatal()

    async def run(self, engine: Engine) -> RunSummary:
        """Let ``engine`` answer what is pending. StorageError if results could not be written; what the engine raises
        passes through. Finished work is saved in either case."""
        if self.source is None or len(self.source) == 0:
            return RunSummary()
        sink = self._sink()
        sink.on_fatal = engine.request_stop
        timer = None
        if self.options.max_seconds is not None:
            timer = asyncio.get_running_loop().call_later(self.options.max_seconds, engine.request_stop)
        try:
            summary = await engine.run(self.source)
        finally:
            if timer is not None:
                timer.cancel()
            sink.on_fatal = lambda: None
            sink.flush()
        self._raise_fatal()
        return summary

    def finish(self) -> Counts:
        """If every row has its record, put the output into place. StorageError leaves the work saved."""
        counts, paths = self.counts(), self.claim.paths
        if self._complete_already:
            paths.settle()  # a kill between the rename and the tidying up leaves files
        if self._complete_already or counts.left or self.scan is None or self.manifest is None:
            return counts
        sink = self._sink()
        sink.flush()
        self._raise_fatal()
        if self.claim.scratch is None:
            assemble(sink, paths.assembled, paths.output, unordered=self.options.unordered)
            self.manifest.complete = True
            self.manifest.result = {"ok": counts.ok, "failed": counts.failed, "cut_by_length": counts.cut}
            self.manifest.save(paths.manifest)
            sink.close()
            paths.settle()
        return counts

    def counts(self) -> Counts:
        total = len(self.scan.rows) if self.scan is not None else 0
        if self._complete_already and self.manifest is not None:
            result = self.manifest.result
            return Counts(total, total, result.get("failed", 0), result.get("cut_by_length", 0))
        done = self.sink.journal.done if self.sink is not None else DoneTable()
        return Counts(total, len(done), done.number(Status.FAILED), done.number(Status.CUT))

    def close(self) -> None:
        """Flush and give the output up for a later run. Idempotent."""
        if self.sink is not None:
            self.sink.close()
        if self.scan is not None:
            self.scan.rows.close()
        if self.manifest is None and self.claim.expendable:
            self.claim.paths.settle()  # nothing was begun: leave nothing behind
        elif self._nothing_gained():
            self.claim.paths.discard()  # the engine could not start, say: the same command may simply be given again
        self.claim.release()

    def _nothing_gained(self) -> bool:
        """The model has not produced a token in this job."""
        if self.claim.start is not Start.FRESH or self.sink is None or self.manifest is None or self.manifest.complete:
            return False
        return len(self.sink.journal.done) == self._settled and not self.sink.journal.live and self.counts().left > 0

    def _choose_seed(self) -> int:
        """Drawn once in a job's life. Below 2^53, so that every JSON reader keeps it exact."""
        if self.options.seed is not None:
            return self.options.seed % 2**64
        if self.claim.manifest is not None:
            return self.claim.manifest.base_seed
        return secrets.randbits(53)

    def _open_results(self) -> DoneTable:
        """Rows that are done before this run. Only a run that goes on has any."""
        paths = self.claim.paths
        if self.claim.start is Start.FRESH:
            return DoneTable()
        if self.claim.start is Start.REOPEN:
            done = index_output(paths.output)
            if self._nothing_to_add(done):
                self._complete_already = True
                return done
            self._copy_output(done)
        self.sink = ResultSink(paths)
        done = self.sink.journal.done
        if self.options.retry_errors:
            for row in [row for row, entry in done.rows() if entry.status is Status.FAILED]:
                self.sink.forget(row)
        return done

    def _nothing_to_add(self, done: DoneTable) -> bool:
        old = self.claim.manifest
        if old is None or len(done) != old.rows:
            raise UsageError(f"{self.claim.paths.output} has {len(done)} records, not those of its job; --overwrite")
        grown = self.options.limit != old.limit and (self.options.limit is None or self.options.limit > old.rows)
        retry = self.options.retry_errors and done.number(Status.FAILED) > 0
        if (grown or retry) and old.unordered:
            raise UsageError("a finished --unordered output cannot be reopened: its order does not say its rows")
        return not (grown or retry)

    def _copy_output(self, done: DoneTable) -> None:
        """Turn a complete output back into an unfinished job; the output itself stays until it is replaced."""
        paths = self.claim.paths
        try:
            paths.journal.unlink(missing_ok=True)
            shutil.copyfile(paths.output, paths.partial)
        except OSError as error:
            raise StorageError(f"cannot copy {paths.output} to {paths.partial}: {error.strerror}") from error
        from batchgen_lite.jobs.journal import Journal

        journal = Journal(paths.journal)
        for row, entry in done.rows():
            journal.finished(row, entry)
        journal.flush()
        journal.close()

    def _settle_manifest(self, scan: Scan) -> None:
        paths, old = self.claim.paths, self.claim.manifest
        identity = self._identity(scan)
        manifest = Manifest(
            identity=identity,
            base_seed=self.base_seed,
            date=self.date,
            tool_version=__version__,
            input_name=self.options.input,
            model=self.text.name,
            rows=len(scan.rows),
            limit=self.options.limit,
            unordered=self.options.unordered,
        )
        if old is not None:
            refuse_another_job(paths.manifest, old.differences(identity))
            if len(scan.rows) < old.rows:
                raise UsageError(f"--limit {self.options.limit} is below the {old.rows} rows of the run before")
            if self._complete_already:
                self.manifest = old
                return
        else:
            paths.discard(keep_input=True)
            self.sink = ResultSink(paths)
        manifest.save(paths.manifest)
        self.manifest = manifest

    def _identity(self, scan: Scan) -> dict[str, Any]:
        defaults = {name: self.text.generation_config.get(name) for name in GENERATION_CONFIG_FIELDS}
        return {
            "input_sha256": scan.sha256,
            "model": dict(self.text.identity()),
            "engine": dict(self.options.engine_identity),
            "sampling": dict(self.options.sampling),
            "model_sampling_defaults": {name: value for name, value in defaults.items() if value is not None},
            "chat_template_kwargs": dict(self.options.template_kwargs),
            "on_long": self.options.on_long,
            "seed": self.base_seed,
            "date": self.date,
        }

    def _sink(self) -> ResultSink:
        if self.sink is None:
            raise RuntimeError("Job.prepare comes first")
        return self.sink

    def _raise_fatal(self) -> None:
        if self.sink is not None and self.sink.fatal is not None:
            raise self.sink.fatal


def _midnight(date: str) -> int:
    return calendar.timegm(datetime.date.fromisoformat(date).timetuple())
