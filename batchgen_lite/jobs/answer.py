"""What a row came to, before it is written in either shape."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from batchgen_lite.errors import ModelError, RowError, StorageError


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """One generated token with its log probability (natural log, raw logits) and the best alternatives."""

    token: int
    text: str
    logprob: float
    top: tuple[tuple[int, str, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Answer:
    """A finished row. ``finish_reason`` "stop" or "length"; ``stop_reason`` the stop string or id, None for EOS."""

    text: str
    finish_reason: str
    stop_reason: str | int | None
    prompt_tokens: int
    completion_tokens: int
    reasoning: str | None = None
    logprobs: Sequence[TokenLogprobs] | None = None


@dataclass(frozen=True, slots=True)
class Failure:
    """A row's error: ``code`` is stable; ``line`` the physical line number, None outside a file."""

    code: str
    message: str
    type: str
    param: str | None = None
    line: int | None = None

    @property
    def status_code(self) -> int:
        """The HTTP status that a service would answer."""
        return 400 if self.type == INVALID else 500


INVALID = "invalid_request_error"
INTERNAL = "server_error"

_SERVER_CODES = frozenset({"internal", "non_finite_logits", "capacity"})


def failure_of(error: BaseException, line: int | None = None) -> Failure:
    """The record of ``error``: a RowError as it says, anything else as an internal error of this row."""
    if isinstance(error, RowError):
        kind = INTERNAL if error.code in _SERVER_CODES else INVALID
        return Failure(error.code, str(error), kind, error.param, line)
    message = str(error) if isinstance(error, (ModelError, StorageError)) else f"{type(error).__name__}: {error}"
    return Failure("internal", message, INTERNAL, None, line)
