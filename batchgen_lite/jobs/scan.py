"""The first pass over the input: hash it, check every line, count its tokens, index it. Nothing of a line is kept."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Container
from dataclasses import dataclass
from pathlib import Path

from batchgen_lite.errors import RowError, StorageError
from batchgen_lite.jobs.envelope import Envelope, RowId, Shape, open_envelope
from batchgen_lite.jobs.lines import MAX_LINE_BYTES, RawLine, read_lines
from batchgen_lite.jobs.prepare import PreparedRow, Preparer
from batchgen_lite.jobs.rows import Rows
from batchgen_lite.runtime.interface import RequestSize


class RowReader:
    """Turns lines into rows, the same way in the first pass and at admission."""

    def __init__(self, preparer: Preparer) -> None:
        self.text = preparer.text
        self._preparer = preparer
        self.line_number: Callable[[int], int] = lambda row: row + 1
        self._first_row_of: dict[int, int] = {}

    def envelope(self, line: RawLine) -> Envelope:
        if line.oversize:
            raise RowError("invalid_request", f"the line is longer than {MAX_LINE_BYTES} bytes; shorten it")
        return open_envelope(line.data)

    def prepare(self, envelope: Envelope, row: int) -> PreparedRow:
        """RowError if the row cannot be answered, also because an earlier row has its id."""
        self._refuse_duplicate(envelope.custom_id, row)
        return self._preparer.prepare(envelope, row)

    def claim(self, custom_id: RowId, row: int) -> None:
        """The id belongs to the first row that has it. Ids are kept as 64-bit digests: two ids of one digest, to be
        expected once in a job of billions of rows, would fail the second row rather than answer it wrongly."""
        if custom_id is not None:
            self._first_row_of.setdefault(_digest(custom_id), row)

    def _refuse_duplicate(self, custom_id: RowId, row: int) -> None:
        if custom_id is None:
            return
        first = self._first_row_of.get(_digest(custom_id), row)
        if first != row:
            shown = json.dumps(custom_id)[:80]
            raise RowError(
                "duplicate_id",
                f"the id {shown} was given before, on line {self.line_number(first)}; ids must differ",
                param="custom_id",
            )


@dataclass(frozen=True, slots=True)
class Scan:
    """``sha256``: of the whole input, decompressed; ``lines``: rows in the file, also those beyond the limit."""

    rows: Rows
    sha256: str
    lines: int
    bad: int
    prompt_tokens: int
    max_new_tokens: int


def scan_input(
    path: Path,
    reader: RowReader,
    *,
    limit: int | None = None,
    done: Container[int] = (),
    observe: Callable[[int], object] = lambda row: None,
) -> Scan:
    """Index the lines of ``path``. Rows in ``done`` are not tokenised again. ``observe`` is called with each row's
    number, to show progress and to stop (it may raise). UsageError or StorageError if the file as such is unfit."""
    rows = Rows(path)
    reader.line_number = rows.number
    digest = hashlib.sha256()
    shape = Shape.FLAT
    lines = bad = prompt_tokens = max_new_tokens = 0
    try:
        with path.open("rb") as stream:
            for line in read_lines(stream, digest.update):
                row = lines
                lines += 1
                observe(row)
                if limit is not None and row >= limit:
                    continue
                shape, size = _measure(reader, line, row, shape, row in done)
                rows.add(line, shape, size)
                bad += size is None
                if size is not None:
                    prompt_tokens += size.prompt_tokens
                    max_new_tokens += size.max_tokens
    except OSError as error:
        rows.close()
        raise StorageError(f"cannot read the input {path}: {error.strerror}") from error
    except BaseException:
        rows.close()
        raise
    return Scan(rows, digest.hexdigest(), lines, bad, prompt_tokens, max_new_tokens)


def _measure(reader: RowReader, line: RawLine, row: int, before: Shape, done: bool) -> tuple[Shape, RequestSize | None]:
    """The line's shape and size, None if it cannot be answered. A line that shows no shape takes that of the line
    before it, so that a file of batch lines is answered in batch lines throughout."""
    try:
        envelope = reader.envelope(line)
    except RowError:
        return before, None
    reader.claim(envelope.custom_id, row)
    if done:
        return envelope.shape, RequestSize(0, 0)
    try:
        prepared = reader.prepare(envelope, row)
    except RowError:
        return envelope.shape, None
    return envelope.shape, RequestSize(len(prepared.prompt_ids), prepared.params.max_tokens)


def _digest(custom_id: RowId) -> int:
    kind = b"s" if isinstance(custom_id, str) else b"i"
    text = str(custom_id).encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(kind + text, digest_size=8).digest(), "little")
