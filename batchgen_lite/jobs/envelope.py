"""What a line is before what it asks for: its JSON object, its shape and its id.

Kept apart from the request itself because a line with a wrong request still has an id and a shape, and its error
record must carry both.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

from batchgen_lite.errors import RowError
from batchgen_lite.jobs.strict_json import parse_object


class Shape(enum.IntEnum):
    """How a line asks and how its record answers. Values are kept in memory, one byte a row."""

    FLAT = 0
    CHAT = 1  # OpenAI batch line for /v1/chat/completions
    COMPLETION = 2  # OpenAI batch line for /v1/completions

    @property
    def openai(self) -> bool:
        return self is not Shape.FLAT


RowId = str | int | None

_PROMPT_NAMES = ("prompt", "messages", "text", "token_ids")


@dataclass(frozen=True, slots=True)
class Envelope:
    """``fields`` is the whole object of the line; ``custom_id`` as given (a string or an integer), None if absent."""

    shape: Shape
    custom_id: RowId
    fields: dict[str, Any]


def open_envelope(data: bytes) -> Envelope:
    """RowError if the line is no JSON object. A wrong id is found later, by ``check_id``."""
    fields = parse_object(data)
    return Envelope(_shape(fields), _row_id(fields), fields)


def check_id(envelope: Envelope) -> None:
    """RowError if the line has an id of a wrong type."""
    name = id_name(envelope.fields)
    if name is not None and envelope.custom_id is None and envelope.fields[name] is not None:
        kind = type(envelope.fields[name]).__name__
        raise RowError("invalid_request", f"{name} is a {kind}: it must be a string or an integer", param=name)


def id_name(fields: dict[str, Any]) -> str | None:
    """The field that identifies the line: ``custom_id``, else ``id``."""
    if "custom_id" in fields:
        return "custom_id"
    return "id" if "id" in fields else None


def _row_id(fields: dict[str, Any]) -> RowId:
    name = id_name(fields)
    value = fields[name] if name is not None else None
    if isinstance(value, bool) or not isinstance(value, (str, int)):
        return None
    return value


def _shape(fields: dict[str, Any]) -> Shape:
    """OpenAI's if there is a body, or a url without a prompt of its own (a batch line that forgot its body)."""
    body = fields.get("body")
    if not isinstance(body, dict) and ("url" not in fields or any(name in fields for name in _PROMPT_NAMES)):
        return Shape.FLAT
    url = fields.get("url")
    if isinstance(url, str) and url.rstrip("/").endswith("/completions"):
        return Shape.CHAT if "/chat/" in url else Shape.COMPLETION
    return Shape.COMPLETION if isinstance(body, dict) and "prompt" in body and "messages" not in body else Shape.CHAT
