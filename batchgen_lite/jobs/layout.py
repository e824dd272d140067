"""The files of a job, all beside its output, and the checks on their names."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path

from batchgen_lite.errors import UsageError


@dataclass(frozen=True, slots=True)
class JobPaths:
    """``output`` appears complete or not at all; the others exist while the job is unfinished (manifest: for good)."""

    output: Path

    def _beside(self, suffix: str) -> Path:
        return self.output.with_name(self.output.name + suffix)

    @property
    def partial(self) -> Path:
        """Finished records, in the order in which they finished."""
        return self._beside(".partial")

    @property
    def journal(self) -> Path:
        """Tokens of running rows; where each finished record lies in ``partial``."""
        return self._beside(".journal")

    @property
    def manifest(self) -> Path:
        """What the job is: a resumed run must be the same. Stays beside the output as its provenance."""
        return self._beside(".manifest.json")

    @property
    def lock(self) -> Path:
        """Held while a run is alive; its text is the live status."""
        return self._beside(".lock")

    @property
    def staged(self) -> Path:
        """Copy of a piped or compressed input."""
        return self._beside(".input")

    @property
    def staged_draft(self) -> Path:
        """The copy while it is written."""
        return self._beside(".input.new")

    @property
    def assembled(self) -> Path:
        """The final file while it is written; renamed to ``output``."""
        return self._beside(".new")

    def discard(self, *, keep_input: bool = False) -> None:
        """Remove what an earlier run left, except its output and lock."""
        for path in (self.partial, self.journal, self.journal_draft, self.manifest, self.assembled):
            path.unlink(missing_ok=True)
        if not keep_input:
            self.staged.unlink(missing_ok=True)
        self.staged_draft.unlink(missing_ok=True)

    @property
    def journal_draft(self) -> Path:
        """The journal's shorter successor while it is written."""
        return self._beside(".journal.new")

    def settle(self) -> None:
        """Remove what only an unfinished job needs; called once the output is in place."""
        for path in (self.partial, self.journal, self.journal_draft, self.assembled, self.staged, self.staged_draft):
            path.unlink(missing_ok=True)


def job_paths(output: str, source: str) -> JobPaths:
    """The files of the job that answers ``source`` into ``output``. A link as output means its target.

    UsageError if the output cannot be a file there, or is the input (by name, through links, or as one of the
    job's own files)."""
    target = Path(os.path.realpath(output))
    if target.is_dir():
        raise UsageError(f"the output {output} is a directory; give a file name in it, as in {output}/answers.jsonl")
    if not target.parent.is_dir():
        raise UsageError(f"the output's directory {target.parent} does not exist; create it or choose another --output")
    if target.exists() and not stat.S_ISREG(target.stat().st_mode):
        raise UsageError(f"the output {output} is not a regular file; use --output - to write to standard output")
    if not os.access(target.parent, os.W_OK):
        raise UsageError(f"cannot write into {target.parent}; check its permissions or choose another --output")
    paths = JobPaths(target)
    if source != "-":
        _refuse_input_among(paths, source)
    return paths


def _refuse_input_among(paths: JobPaths, source: str) -> None:
    owned = [paths.output, paths.partial, paths.journal, paths.manifest, paths.lock, paths.staged, paths.assembled]
    for path in owned:
        same = os.path.realpath(source) == os.path.realpath(path)
        if not same and path.exists() and os.path.exists(source):
            same = os.path.samefile(source, path)
        if same:
            raise UsageError(f"the input {source} and the job's {path.name} are the same file; choose another --output")
