"""--trace and --report, for the command line and the library alike: what has to be right before a run, and the files
behind it."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from batchgen_lite.errors import UsageError
from batchgen_lite.trace.recorder import SILENT, Recorder
from batchgen_lite.trace.run_recorder import RunRecorder

TRACE_ENDINGS = (".json", ".json.gz")
REPORT_ENDINGS = (".html",)


class Pictures:
    """The files a run was asked to draw. ``recorder`` listens to the run; ``write`` comes behind it, however it ended.

    Raises UsageError at once for what would fail after hours: a wrong ending, a folder that is not there or read-only,
    a file that is the run's own, a missing library.
    """

    def __init__(self, trace: str | Path | None, report: str | Path | None, own: Sequence[str | None]) -> None:
        """``own``: files of the run itself, which must not be overwritten."""
        self._trace = _checked("--trace", trace, TRACE_ENDINGS, own)
        self._report = _checked("--report", report, REPORT_ENDINGS, own)
        if self._report is not None and importlib.util.find_spec("plotly") is None:
            raise UsageError(
                "--report draws with plotly, which is not installed; pip install 'batchgen-lite[report]', or take "
                "--trace, which needs nothing"
            )
        self._kept = RunRecorder() if self._trace or self._report else None

    @property
    def recorder(self) -> Recorder:
        return self._kept or SILENT

    def write(self, title: str, lines: Mapping[str, str], note: Callable[[str], object]) -> None:
        """Both files, from what was recorded up to now. A file that cannot be written is a note, not an error: the
        answers are saved, and worth more. ``lines``: label -> text for the head of the report."""
        recorder = self._kept
        if recorder is None:
            return
        if self._trace is not None:
            from batchgen_lite.trace.chrome import write_trace

            trace = self._trace
            _attempt(trace, lambda: write_trace(trace, recorder), note)
        if self._report is not None:
            from batchgen_lite.report.page import write_report

            report = self._report
            _attempt(report, lambda: write_report(report, recorder, title, lines), note)


def _attempt(path: Path, write: Callable[[], None], note: Callable[[str], object]) -> None:
    try:
        write()
    except OSError as error:
        note(f"{path} could not be written: {error.strerror or error}")


def _checked(flag: str, given: str | Path | None, endings: Sequence[str], own: Sequence[str | None]) -> Path | None:
    if given is None:
        return None
    name, path = str(given), Path(given)
    if not path.name.endswith(tuple(endings)) or path.name in endings:
        raise UsageError(f"{flag} is {name!r}: its name must end in {' or '.join(endings)}")
    if any(other is not None and other != "-" and _same(path, Path(other)) for other in own):
        raise UsageError(f"{flag} is {name!r}, which is a file of the run itself; choose another name")
    if path.is_dir():
        raise UsageError(f"{flag} is {name!r}, which is a folder")
    if not path.parent.is_dir():
        raise UsageError(f"{flag} is {name!r}, but there is no folder {path.parent}; make it first")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise UsageError(f"{flag} is {name!r}, but {path.parent} cannot be written to")
    return path


def _same(one: Path, other: Path) -> bool:
    return one.absolute() == other.absolute() or (one.exists() and other.exists() and one.samefile(other))
