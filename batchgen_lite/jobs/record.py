"""Record lines: what an answer or a failure looks like in the output, in the shape in which its line asked.

Records depend on the row alone, never on the clock or the run: a resumed job writes the same bytes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from batchgen_lite.jobs.answer import Answer, Failure, TokenLogprobs
from batchgen_lite.jobs.envelope import RowId, Shape

MIN_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON cannot say (vLLM's value)."""

# Raw, these would be line ends to str.splitlines(), which many readers of JSONL use.
_LINE_ENDS = {"\u0085": "\\u0085", "\u2028": "\\u2028", "\u2029": "\\u2029"}

_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False)


@dataclass(frozen=True, slots=True)
class RowHead:
    """What a record repeats of its line. ``created``: Unix time of the job's date; ``model``: its name."""

    index: int
    shape: Shape
    custom_id: RowId
    model: str
    created: int
    carried: Mapping[str, Any] = field(default_factory=dict)


def answer_line(head: RowHead, answer: Answer) -> bytes:
    """One output line, with its line end."""
    return encode(_openai_answer(head, answer) if head.shape.openai else flat_answer(head, answer))


def failure_line(head: RowHead, failure: Failure) -> bytes:
    """One output line, with its line end."""
    return encode(_openai_failure(head, failure) if head.shape.openai else flat_failure(head, failure))


def encode(record: Mapping[str, Any]) -> bytes:
    """Compact to read, one line whatever is in it, always valid UTF-8."""
    text = _ENCODER.encode(record)
    if not text.isascii():
        for char, escape in _LINE_ENDS.items():
            text = text.replace(char, escape)
    try:
        return text.encode() + b"\n"
    except UnicodeEncodeError:  # half of a surrogate pair in a carried column: only an escape can say it
        return json.dumps(record, allow_nan=False).encode() + b"\n"


def flat_answer(head: RowHead, answer: Answer) -> dict[str, Any]:
    record: dict[str, Any] = {"custom_id": head.custom_id, "index": head.index, "text": answer.text}
    if answer.reasoning is not None:
        record["reasoning"] = answer.reasoning
    record |= {"finish_reason": answer.finish_reason, "stop_reason": answer.stop_reason}
    if answer.logprobs is not None:
        record["logprobs"] = [_token(entry) for entry in answer.logprobs]
    return record | {"usage": _usage(answer), "error": None} | dict(head.carried)


def flat_failure(head: RowHead, failure: Failure) -> dict[str, Any]:
    record = {"custom_id": head.custom_id, "index": head.index, "text": None, "finish_reason": None}
    return record | {"stop_reason": None, "usage": None, "error": _error(failure)} | dict(head.carried)


def _openai_answer(head: RowHead, answer: Answer) -> dict[str, Any]:
    chat = head.shape is Shape.CHAT
    choice: dict[str, Any] = {"index": 0}
    if chat:
        message: dict[str, Any] = {"role": "assistant", "content": answer.text}
        if answer.reasoning is not None:
            message["reasoning"] = answer.reasoning
        choice["message"] = message
    else:
        choice["text"] = answer.text
    choice["logprobs"] = _openai_logprobs(answer, chat)
    choice |= {"finish_reason": answer.finish_reason, "stop_reason": answer.stop_reason}
    body = {
        "id": ("chatcmpl-" if chat else "cmpl-") + _ident(head),
        "object": "chat.completion" if chat else "text_completion",
        "created": head.created,
        "model": head.model,
        "choices": [choice],
        "usage": _usage(answer),
    }
    return _envelope(head, 200, body)


def _openai_failure(head: RowHead, failure: Failure) -> dict[str, Any]:
    """Details in response.body.error, as the service really writes them; its published schema says otherwise."""
    return _envelope(head, failure.status_code, {"error": _error(failure)}, head.index)


def _envelope(head: RowHead, status: int, body: dict[str, Any], index: int | None = None) -> dict[str, Any]:
    ident = _ident(head, index)
    response = {"status_code": status, "request_id": "req_" + ident, "body": body}
    return {"id": "batch_req_" + ident, "custom_id": head.custom_id, "response": response, "error": None}


def _ident(head: RowHead, index: int | None = None) -> str:
    """Stable over runs: from the model's name and the row's id, or its position where it has none. ``index`` sets an
    error apart, whose id may be that of another row."""
    key = [head.model, head.custom_id, head.index if head.custom_id is None else index]
    return hashlib.sha256(json.dumps(key).encode()).hexdigest()[:24]


def _usage(answer: Answer) -> dict[str, int]:
    total = answer.prompt_tokens + answer.completion_tokens
    return {
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": answer.completion_tokens,
        "total_tokens": total,
    }


def _error(failure: Failure) -> dict[str, Any]:
    error: dict[str, Any] = {"code": failure.code, "message": failure.message}
    error |= {"type": failure.type, "param": failure.param}
    return error if failure.line is None else error | {"line": failure.line}


def _token(entry: TokenLogprobs) -> dict[str, Any]:
    top = [_candidate(*candidate) for candidate in entry.top]
    return _candidate(entry.token, entry.text, entry.logprob) | {"top_logprobs": top}


def _candidate(token: int, text: str, logprob: float) -> dict[str, Any]:
    """``bytes`` is None where the token is but a part of a character."""
    raw = None if "\ufffd" in text else list(text.encode())
    return {"token": text, "token_id": token, "logprob": _finite(logprob), "bytes": raw}


def _openai_logprobs(answer: Answer, chat: bool) -> dict[str, Any] | None:
    if answer.logprobs is None:
        return None
    if chat:
        return {"content": [_token(entry) for entry in answer.logprobs]}
    offsets, position = [], 0
    for entry in answer.logprobs:
        offsets.append(position)
        position += len(entry.text)
    return {
        "tokens": [entry.text for entry in answer.logprobs],
        "token_logprobs": [_finite(entry.logprob) for entry in answer.logprobs],
        "top_logprobs": [{text: _finite(value) for _, text, value in entry.top} for entry in answer.logprobs],
        "text_offset": offsets,
    }


def _finite(value: float) -> float:
    return max(value, MIN_LOGPROB)
