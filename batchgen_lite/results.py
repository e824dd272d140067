"""What the library returns for each prompt: the same content as a record line, as an object."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from batchgen_lite.jobs.answer import Answer, Failure, TokenLogprobs
from batchgen_lite.jobs.envelope import RowId, Shape
from batchgen_lite.jobs.record import RowHead, flat_answer, flat_failure


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one row."""

    prompt_tokens: int = 0
    completion_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True)
class Result:
    """One prompt's answer, or its error: a prompt that fails raises nothing and leaves the others alone.

    ``finish_reason``: "stop" or "length", None for an error. ``stop_reason``: the stop string or token id, None for
    EOS. ``token_ids``: the generated tokens, a final EOS included. ``error``: code, message, type and param."""

    index: int
    text: str
    custom_id: RowId = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    reasoning: str | None = None
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] | None = None
    usage: Usage = Usage()
    error: Failure | None = None

    @property
    def ok(self) -> bool:
        return self.error is None

    def record(self) -> dict[str, Any]:
        """As a flat line of an output file has it, but for carried columns."""
        head = RowHead(self.index, Shape.FLAT, self.custom_id, model="", created=0)
        if self.error is not None:
            return flat_failure(head, self.error)
        return flat_answer(
            head,
            Answer(
                text=self.text,
                finish_reason=self.finish_reason or "stop",
                stop_reason=self.stop_reason,
                prompt_tokens=self.usage.prompt_tokens,
                completion_tokens=self.usage.completion_tokens,
                reasoning=self.reasoning,
                logprobs=self.logprobs,
            ),
        )


def result_of(index: int, custom_id: RowId, answer: Answer, token_ids: list[int]) -> Result:
    return Result(
        index=index,
        text=answer.text,
        custom_id=custom_id,
        finish_reason=answer.finish_reason,
        stop_reason=answer.stop_reason,
        reasoning=answer.reasoning,
        token_ids=tuple(token_ids),
        logprobs=None if answer.logprobs is None else tuple(answer.logprobs),
        usage=Usage(answer.prompt_tokens, answer.completion_tokens),
    )
