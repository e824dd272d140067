"""A job's rows as the engine sees them: sizes now, text and tokens at admission."""

from __future__ import annotations

import contextlib
from array import array

from batchgen_lite.errors import RowError, StorageError
from batchgen_lite.jobs.answer import Answer, Failure, failure_of
from batchgen_lite.jobs.done_table import Status
from batchgen_lite.jobs.envelope import Envelope
from batchgen_lite.jobs.flat_line import carried_columns
from batchgen_lite.jobs.prepare import PreparedRow
from batchgen_lite.jobs.record import RowHead, answer_line, failure_line
from batchgen_lite.jobs.row_output import RowOutput
from batchgen_lite.jobs.rows import Rows
from batchgen_lite.jobs.scan import RowReader
from batchgen_lite.jobs.sink import ResultSink
from batchgen_lite.runtime.interface import RequestSize, SampledToken, SequenceRequest


class JobSource:
    """The rows still to be answered. Implements the engine's RequestSource; index counts pending rows only."""

    def __init__(self, rows: Rows, reader: RowReader, sink: ResultSink, *, model: str, created: int) -> None:
        self._rows = rows
        self._reader = reader
        self._sink = sink
        self._model = model
        self._created = created
        self._pending = array("Q", (row for row in range(len(rows)) if row not in sink.journal.done))

    def __len__(self) -> int:
        return len(self._pending)

    def size(self, index: int) -> RequestSize:
        return self._rows.size(self._pending[index])

    def open(self, index: int) -> tuple[SequenceRequest, RowOutput]:
        """RowError as the engine expects; a changed or unreadable input stops the whole run."""
        row = self._pending[index]
        prepared, output = self._output(row)
        prior = self._prior(row)
        output.replay(prior)
        request = SequenceRequest(
            row=prepared.stream,
            prompt_ids=prepared.prompt_ids,
            sampling=prepared.params,
            seed=prepared.seed,
            prior_ids=[sampled.token for sampled in prior],
            stop_ids=output.stop_ids,
        )
        return request, output

    def failed(self, index: int, error: BaseException) -> None:
        self._fail(self._pending[index], error)

    def settle(self) -> None:
        """Write the records that need no engine: lines that cannot be answered, and rows whose last token is in the
        journal although their record is not. Afterwards they are not pending."""
        left = array("Q")
        for row in self._pending:
            if self._rows.bad(row):
                self._fail_bad(row)
            elif row not in self._sink.journal.live or not self._finish_from_journal(row):
                left.append(row)
        self._pending = left

    def _fail_bad(self, row: int) -> None:
        """Find the line's error again: errors of many lines are not kept in memory."""
        try:
            self._reader.prepare(self._reader.envelope(self._rows.line(row)), row)
        except RowError as error:
            self._fail(row, error)
        else:
            raise RuntimeError(f"line {self._rows.number(row)} was refused in the first pass but not in the second")

    def _finish_from_journal(self, row: int) -> bool:
        try:
            _, output = self._output(row)
            finish = output.replay(self._prior(row))
        except RowError:
            return False  # the engine will open it and meet the same error
        if finish is not None:
            output.done(finish)
        return finish is not None

    def _prior(self, row: int) -> list[SampledToken]:
        live = self._sink.journal.live.get(row)
        return live.sampled() if live is not None else []

    def _output(self, row: int) -> tuple[PreparedRow, RowOutput]:
        try:
            line = self._rows.line(row)
        except StorageError as error:
            self._sink.fail(error)
            raise
        envelope = self._reader.envelope(line)
        prepared = self._reader.prepare(envelope, row)
        head = self._head(row, envelope, prepared.request.carried)
        recorder = _Recorder(self._sink, head, scored=prepared.params.logprobs is not None)
        return prepared, RowOutput(prepared, self._reader.text, recorder, line=line.number)

    def _head(self, row: int, envelope: Envelope | None, carried: dict[str, object]) -> RowHead:
        custom_id = envelope.custom_id if envelope is not None else None
        return RowHead(row, self._rows.shape(row), custom_id, self._model, self._created, carried)

    def _fail(self, row: int, error: BaseException) -> None:
        envelope = None
        with contextlib.suppress(RowError, StorageError):
            envelope = self._reader.envelope(self._rows.line(row))
        carried = carried_columns(envelope.fields) if envelope is not None and not envelope.shape.openai else {}
        recorder = _Recorder(self._sink, self._head(row, envelope, carried), scored=False)
        recorder.failed(failure_of(error, self._rows.number(row)))


class _Recorder:
    """Turns what becomes of one row into journal entries and its record."""

    def __init__(self, sink: ResultSink, head: RowHead, *, scored: bool) -> None:
        self._sink = sink
        self._head = head
        self._scored = scored

    def token(self, sampled: SampledToken) -> None:
        self._sink.token(self._head.index, sampled, scored=self._scored)

    def answered(self, answer: Answer, token_ids: list[int]) -> None:
        status = Status.CUT if answer.finish_reason == "length" else Status.STOPPED
        self._sink.record(self._head.index, answer_line(self._head, answer), status)

    def failed(self, failure: Failure) -> None:
        self._sink.record(self._head.index, failure_line(self._head, failure), Status.FAILED)
