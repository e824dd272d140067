"""What a line asks for, whatever its shape."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from batchgen_lite.errors import ParameterError, RowError
from batchgen_lite.jobs.envelope import Envelope, check_id


@dataclass(frozen=True, slots=True)
class LineRequest:
    """Exactly one of ``prompt`` (raw text), ``messages`` (for the chat template) and ``token_ids`` is set.

    ``sampling`` holds the line's own parameters by canonical name, unchecked; ``carried`` the columns that come back
    in the record; ``template_kwargs`` the line's own variables for the chat template."""

    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    token_ids: list[int] | None = None
    sampling: dict[str, Any] = field(default_factory=dict)
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    carried: dict[str, Any] = field(default_factory=dict)


def read_request(envelope: Envelope) -> LineRequest:
    """The request in ``envelope``. RowError names the field at fault; nothing that is not honoured is accepted."""
    from batchgen_lite.jobs import flat_line, openai_line

    check_id(envelope)
    try:
        if envelope.shape.openai:
            return openai_line.read(envelope.fields, envelope.shape)
        return flat_line.read(envelope.fields)
    except ParameterError as error:
        raise error.as_row_error() from None


def check_text(value: Any, name: str) -> str:
    """``value`` if it is a string that has a UTF-8 form (JSON can spell half of a surrogate pair)."""
    if not isinstance(value, str):
        raise RowError("invalid_request", f"{name} is {_shown(value)}: it must be a string", param=name)
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise RowError(
            "invalid_request", f"{name} holds half of a surrogate pair at character {error.start + 1}", param=name
        ) from None
    return value


def check_messages(value: Any, name: str = "messages") -> list[dict[str, Any]]:
    """A conversation whose contents are plain strings: text parts are joined by newlines (as vLLM does), null is "".
    Other fields of a message (name, tool_calls, ...) reach the template as they are."""
    if not isinstance(value, list) or not value:
        raise RowError(
            "invalid_request", f"{name} is {_shown(value)}: it must be a list of at least one message", param=name
        )
    return [_message(message, f"{name}[{position}]") for position, message in enumerate(value)]


def _message(message: Any, name: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise RowError("invalid_request", f"{name} is {_shown(message)}: it must be an object", param=name)
    role = check_text(message.get("role"), f"{name}.role")
    if not role:
        raise RowError("invalid_request", f"{name}.role is empty; use system, user or assistant", param=f"{name}.role")
    return {**message, "content": _content(message.get("content"), f"{name}.content")}


def _content(content: Any, name: str) -> str:
    if content is None:
        return ""
    if not isinstance(content, list):
        return check_text(content, name)
    texts = []
    for position, part in enumerate(content):
        place = f"{name}[{position}]"
        if isinstance(part, str):
            texts.append(check_text(part, place))
            continue
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(part, dict) or kind != "text":
            shown = repr(kind) if isinstance(kind, str) else _shown(part)
            raise RowError(
                "unsupported_content", f"{place} is {shown[:60]}: only parts of type 'text' are supported", param=place
            )
        texts.append(check_text(part.get("text"), f"{place}.text"))
    return "\n".join(texts)


def check_token_ids(value: Any, name: str) -> list[int]:
    """A list of non-negative integers. Their upper limit is the model's to check."""
    if not isinstance(value, list) or not value:
        raise RowError(
            "invalid_request", f"{name} is {_shown(value)}: it must be a list of at least one token id", param=name
        )
    for position, token in enumerate(value):
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < 2**31:
            place = f"{name}[{position}]"
            raise RowError("invalid_request", f"{place} is {_shown(token)}: it must be a token id", param=place)
    return value


def check_kwargs(value: Any, name: str) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise RowError("invalid_request", f"{name} is {_shown(value)}: it must be an object", param=name)
    return value


def _shown(value: Any) -> str:
    """A short description of a wrong value, for messages."""
    if value is None:
        return "null or absent"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):
        return str(value) if value.bit_length() <= 64 else f"an integer of {value.bit_length()} bits"
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, (list, tuple)):
        return "a list" if value else "an empty list"
    kinds: dict[type, str] = {str: "a string", dict: "an object"}
    return kinds.get(type(value), type(value).__name__)
