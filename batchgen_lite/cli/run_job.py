"""One run of ``generate``, from flags to exit code."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from batchgen_lite import __version__
from batchgen_lite.cli.confirm import ask_to_fetch
from batchgen_lite.cli.display import Display, make_display
from batchgen_lite.cli.generate import default_output, sampling_of, seconds_of, template_kwargs_of
from batchgen_lite.cli.reports import detail_lines, plan_lines, summary_figures, summary_lines
from batchgen_lite.cli.signals import Interrupted, StopSignals
from batchgen_lite.cli.snapshot import Snapshot
from batchgen_lite.cli.stdout import StdoutFeed
from batchgen_lite.errors import UsageError
from batchgen_lite.jobs.claim import Claim, claim_output
from batchgen_lite.jobs.job import Counts, Job, JobOptions
from batchgen_lite.model_path import resolve_model
from batchgen_lite.offload.devices.names import check_vram, device_kind
from batchgen_lite.pictures import Pictures
from batchgen_lite.runtime.interface import Engine, RunSummary
from batchgen_lite.runtime.options import EngineOptions
from batchgen_lite.session import STUB, TextOptions, engine_kind, open_engine, open_text

_TICK_SECONDS = 0.25
_PUBLISH_SECONDS = 1.0


def run_job(flags: dict[str, Any]) -> int:
    """The exit code of the run. Raises BatchGenError."""
    display = make_display(flags["progress"])
    with StopSignals() as signals:
        try:
            return _Run(flags, display, signals).execute()
        except Interrupted:
            display.close()
            display.note("interrupted; nothing is lost: --resume goes on" if signals.received else "interrupted")
            return signals.exit_code
        finally:
            display.close()


class _Run:
    """The steps of a run share these: flags, display, signals, and what each step brought."""

    def __init__(self, flags: dict[str, Any], display: Display, signals: StopSignals) -> None:
        self.flags = flags
        self.display = display
        self.signals = signals
        self.started = time.monotonic()
        self.kind = engine_kind(flags["engine"])
        self.engine_options = _engine_options(flags)  # wrong values are found before anything is touched
        self.options = _job_options(flags)
        self.output = flags["output"] or default_output(flags["input"])
        own = (flags["input"], self.output, flags["model"])
        self.pictures = Pictures(flags["trace"], flags["report"], own)
        self._to_draw = False

    def execute(self) -> int:
        flags = self.flags
        output = self.output
        resume = flags["resume"] or flags["retry_errors"]
        with contextlib.ExitStack() as stack:
            stack.callback(self._draw, "ended early", {})  # behind all else, however it ends
            with self.signals.held():
                claim = claim_output(output, flags["input"], resume=resume, overwrite=flags["overwrite"])
                stack.callback(claim.release)
            if claim.manifest is not None and claim.manifest.tool_version != __version__:
                self.display.note(
                    f"this job was begun by version {claim.manifest.tool_version}, this is {__version__}: what is left "
                    "may come out differently than it would have there"
                )
            path, job = self._open_job(claim)
            stack.callback(job.close)
            job.prepare(self._on_scanned)
            feed = StdoutFeed(job, unordered=flags["unordered"]) if output == "-" else None
            summary = self._answer(job, path)
            self.signals.on_stop = lambda: None  # putting the output into place is quick and better not cut short
            counts = job.finish()
            if feed is not None:
                feed.finish()
            return self._conclude(job, counts, summary)

    def _open_job(self, claim: Claim) -> tuple[Path, Job]:
        name = self.flags["model"]
        if self.kind == STUB:
            path = Path(name or STUB)
        elif name is None:
            raise UsageError("--model is missing; give a directory, a .gguf file, or a hub id")
        else:
            path = resolve_model(
                name,
                revision=self.flags["revision"],
                download=self.flags["download"],
                note=self.display.note,
                confirm=ask_to_fetch,
            )
        date = claim.job_date(self.options.date)
        text_options = TextOptions(date, self.flags["chat_template"], self.flags["reasoning"])
        # A snapshot's folder is named after a commit: a hub id says more.
        shown = name if name is not None and not Path(name).expanduser().exists() else path.name
        text = open_text(path, shown if self.kind != STUB else STUB, text_options, kind=self.kind)
        return path, Job(claim, self.options, text)

    def _on_scanned(self, row: int) -> None:
        if row > 0 and row % 256 == 0:
            self.display.scanning(row)

    def _answer(self, job: Job, path: Path) -> RunSummary:
        if job.source is None or len(job.source) == 0:
            self.display.plan("batchgen-lite", self._plan(job, {}))
            return RunSummary()
        recorder = self.pictures.recorder
        with _closing(open_engine(path, self.engine_options, kind=self.kind, recorder=recorder)) as engine:
            self._to_draw = True
            self.display.plan("batchgen-lite", self._plan(job, engine.describe()))
            self.signals.on_stop = engine.request_stop
            if self.signals.received is not None:
                raise Interrupted
            return asyncio.run(self._run_engine(job, engine))

    def _plan(self, job: Job, engine_lines: Mapping[str, str]) -> dict[str, str]:
        lines = plan_lines(job, engine_lines)
        return lines | detail_lines(job) if self.flags["verbose"] else lines

    async def _run_engine(self, job: Job, engine: Engine) -> RunSummary:
        ticker = asyncio.create_task(self._tick(job, engine))
        try:
            return await job.run(engine)
        finally:
            ticker.cancel()
            job.claim.lock.publish(Snapshot(job.counts(), engine.progress()).fields())

    async def _tick(self, job: Job, engine: Engine) -> None:
        published = float("-inf")
        while True:
            snapshot = Snapshot(job.counts(), engine.progress())
            self.display.update(snapshot)
            if time.monotonic() - published >= _PUBLISH_SECONDS:
                published = time.monotonic()
                job.claim.lock.publish(snapshot.fields())
            await asyncio.sleep(_TICK_SECONDS)

    def _conclude(self, job: Job, counts: Counts, summary: RunSummary) -> int:
        seconds = time.monotonic() - self.started
        stopped = counts.left > 0
        title = "stopped; finished work is saved, --resume goes on" if stopped else "done"
        lines = summary_lines(counts, summary, seconds=seconds)
        self._draw(title, {"model": job.text.name, "input": self.flags["input"]} | lines)
        self.display.summary(title, lines, summary_figures(counts, summary, seconds=seconds))
        if stopped:
            return self.signals.exit_code
        return 1 if counts.failed else 0

    def _draw(self, title: str, lines: Mapping[str, str]) -> None:
        """Write the pictures, once, if an engine has run."""
        if self._to_draw:
            self._to_draw = False
            self.pictures.write(title, lines, self.display.note)


@contextlib.contextmanager
def _closing(engine: Engine) -> Iterator[Engine]:
    try:
        yield engine
    finally:
        engine.close()


def _engine_options(flags: dict[str, Any]) -> EngineOptions:
    from batchgen_lite.offload.budget import parse_size
    from batchgen_lite.offload.spill_file import spill_options

    sizes = {name: parse_size(flags[name], f"--{name}") for name in ("ram", "vram") if flags[name] is not None}
    check_vram(flags["device"], sizes.get("vram"))
    return EngineOptions(
        ram=sizes.get("ram"),
        threads=flags["threads"],
        kv_dtype=flags["kv_dtype"],
        device=flags["device"],
        vram=sizes.get("vram"),
        spill=spill_options(flags["spill_dir"], flags["disk"], flags["spill_write_limit"]),
    )


def _job_options(flags: dict[str, Any]) -> JobOptions:
    return JobOptions(
        input=flags["input"],
        sampling=sampling_of(flags),
        engine_identity={"device": device_kind(flags["device"]), "kv_dtype": flags["kv_dtype"]},
        template_kwargs=template_kwargs_of(flags["chat_template_kwargs"]),
        seed=flags["seed"],
        date=flags["date"],
        limit=flags["limit"],
        on_long=flags["on_long"],
        unordered=flags["unordered"],
        retry_errors=flags["retry_errors"],
        max_seconds=seconds_of(flags["max_time"]),
    )
