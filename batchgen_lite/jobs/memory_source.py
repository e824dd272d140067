"""Prompts given as Python objects, as an engine sees them: the library's counterpart of a job's file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from batchgen_lite.errors import RowError
from batchgen_lite.jobs.answer import Answer, Failure, failure_of
from batchgen_lite.jobs.envelope import Envelope, RowId, Shape
from batchgen_lite.jobs.prepare import PreparedRow, Preparer
from batchgen_lite.jobs.row_output import RowOutput
from batchgen_lite.jobs.row_text import TextModel
from batchgen_lite.results import Result, result_of
from batchgen_lite.runtime.interface import RequestSize, SampledToken, SequenceRequest

Prompt = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids, or a line as an input file has it: ``{"messages": [...], "temperature": 0}``."""


@dataclass(frozen=True, slots=True)
class _Row:
    index: int
    custom_id: RowId
    prepared: PreparedRow


class MemorySource:
    """Checks and tokenises every prompt at construction. ``deliver`` gets each Result as it is finished, also those of
    prompts that cannot be answered: these at ``settle``."""

    def __init__(
        self,
        prompts: Sequence[Prompt],
        preparers: Sequence[Preparer],
        text: TextModel,
        deliver: Callable[[Result], object],
    ) -> None:
        self._text = text
        self._deliver = deliver
        self._failed: list[Result] = []
        self._rows: list[_Row] = []
        for index, (prompt, preparer) in enumerate(zip(prompts, preparers, strict=True)):
            self._add(index, prompt, preparer)

    def settle(self) -> None:
        """Deliver the errors of prompts that never reach the engine."""
        for result in self._failed:
            self._deliver(result)
        self._failed.clear()

    def __len__(self) -> int:
        return len(self._rows)

    def size(self, index: int) -> RequestSize:
        row = self._rows[index].prepared
        return RequestSize(len(row.prompt_ids), row.params.max_tokens)

    def open(self, index: int) -> tuple[SequenceRequest, RowOutput]:
        row = self._rows[index]
        prepared = row.prepared
        output = RowOutput(prepared, self._text, _Deliverer(row, self._deliver))
        request = SequenceRequest(
            prepared.stream, prepared.prompt_ids, prepared.params, prepared.seed, stop_ids=output.stop_ids
        )
        return request, output

    def failed(self, index: int, error: BaseException) -> None:
        _Deliverer(self._rows[index], self._deliver).failed(failure_of(error))

    def _add(self, index: int, prompt: Prompt, preparer: Preparer) -> None:
        envelope = _envelope(prompt)
        try:
            prepared = preparer.prepare(envelope, index)
        except RowError as error:
            self._failed.append(Result(index, "", envelope.custom_id, error=failure_of(error)))
        else:
            self._rows.append(_Row(index, envelope.custom_id, prepared))


def _envelope(prompt: Prompt) -> Envelope:
    if isinstance(prompt, str):
        return Envelope(Shape.FLAT, None, {"prompt": prompt})
    if not isinstance(prompt, Mapping):
        return Envelope(Shape.FLAT, None, {"token_ids": list(prompt)})
    custom_id = prompt.get("custom_id", prompt.get("id"))
    known = isinstance(custom_id, (str, int)) and not isinstance(custom_id, bool)
    return Envelope(Shape.FLAT, cast(RowId, custom_id) if known else None, dict(prompt))


class _Deliverer:
    """The end of one row becomes its Result."""

    def __init__(self, row: _Row, deliver: Callable[[Result], object]) -> None:
        self._row = row
        self._deliver = deliver

    def token(self, sampled: SampledToken) -> None:
        """Nothing is journalled: a library call has nothing to resume."""

    def answered(self, answer: Answer, token_ids: list[int]) -> None:
        self._deliver(result_of(self._row.index, self._row.custom_id, answer, token_ids))

    def failed(self, failure: Failure) -> None:
        self._deliver(Result(self._row.index, "", self._row.custom_id, error=failure))
