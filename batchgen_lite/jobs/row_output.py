"""One running row: its tokens become text, its end a record."""

from __future__ import annotations

from typing import Protocol

from batchgen_lite.errors import RowError
from batchgen_lite.jobs.answer import Answer, Failure, TokenLogprobs, failure_of
from batchgen_lite.jobs.prepare import PreparedRow
from batchgen_lite.jobs.row_text import TextModel
from batchgen_lite.runtime.interface import Finish, SampledToken


class RowSink(Protocol):
    """What a row tells its job, or the library's caller."""

    def token(self, sampled: SampledToken) -> None: ...
    def answered(self, answer: Answer, token_ids: list[int]) -> None: ...
    def failed(self, failure: Failure) -> None: ...


class RowOutput:
    """The engine's SequenceOutput for one row."""

    def __init__(self, row: PreparedRow, text: TextModel, sink: RowSink, *, line: int | None = None) -> None:
        self._row = row
        self._text = text
        self._sink = sink
        self._line = line
        self._row_text = text.new_row(row.params, row.prompt_ids)
        self._logprobs: list[TokenLogprobs] | None = None if row.params.logprobs is None else []

    @property
    def stop_ids(self) -> frozenset[int]:
        """Every token id that ends this row."""
        return self._row_text.stop_ids

    def replay(self, prior: list[SampledToken]) -> Finish | None:
        """Take tokens of an earlier run. A Finish means that the row had ended when that run was cut off."""
        finish = None
        for sampled in prior:
            finish = self._take(sampled)
        return finish

    def accept(self, token: SampledToken) -> Finish | None:
        if token.error is not None:
            raise RowError("non_finite_logits", f"the model's logits are not finite: {token.error}")
        finish = self._take(token)
        self._sink.token(token)
        return finish

    def done(self, finish: Finish) -> None:
        answer = Answer(
            text=self._row_text.text,
            finish_reason=finish.reason,
            stop_reason=finish.stop_reason,
            prompt_tokens=len(self._row.prompt_ids),
            completion_tokens=len(self._row_text.token_ids),
            reasoning=self._row_text.reasoning,
            logprobs=self._logprobs,
        )
        self._sink.answered(answer, list(self._row_text.token_ids))

    def failed(self, error: BaseException) -> None:
        self._sink.failed(failure_of(error, self._line))

    def _take(self, sampled: SampledToken) -> Finish | None:
        if self._logprobs is not None and sampled.logprob is not None:
            text = self._text.token_text
            top = tuple((token, text(token), value) for token, value in sampled.top_logprobs)
            self._logprobs.append(TokenLogprobs(sampled.token, text(sampled.token), sampled.logprob, top))
        return self._row_text.accept(sampled.token)
