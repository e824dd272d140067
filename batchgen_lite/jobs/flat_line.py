"""Flat lines: ``{"prompt": ..., "temperature": 0, "custom_id": "a", "any column": ...}``."""

from __future__ import annotations

from typing import Any

from batchgen_lite.errors import RowError
from batchgen_lite.jobs.envelope import id_name
from batchgen_lite.jobs.request import LineRequest, check_kwargs, check_messages, check_text, check_token_ids
from batchgen_lite.sampling_mapping import NAMES, pick_sampling

SOURCES = ("prompt", "messages", "text", "token_ids")

RECORD_FIELDS = frozenset(
    {"custom_id", "index", "text", "reasoning", "finish_reason", "stop_reason", "logprobs", "usage", "error"}
)
"""Names that the record itself uses: a column of such a name comes back as ``input_<name>``."""

_REFUSED = {
    "stream": "streaming is not possible in a batch; remove it",
    "tools": "tool calls are not supported; remove it",
    "tool_choice": "tool calls are not supported; remove it",
    "functions": "tool calls are not supported; remove it",
    "echo": "the prompt is never repeated in the text; remove it",
    "suffix": "insertion is not supported; remove it",
}

_OWN = frozenset({*SOURCES, "chat_template_kwargs", *_REFUSED})


def read(fields: dict[str, Any]) -> LineRequest:
    """RowError or ParameterError for what cannot be honoured."""
    given = [name for name in SOURCES if fields.get(name) is not None]
    if len(given) != 1:
        found = " and ".join(given) if given else "none of them"
        raise RowError("invalid_request", f"a line needs exactly one of {', '.join(SOURCES)}; this one has {found}")
    refuse(fields, _REFUSED)
    own = _own_names(fields)
    sampling = pick_sampling(fields, ignore=own)
    kwargs = check_kwargs(fields.get("chat_template_kwargs"), "chat_template_kwargs")
    for name in fields:
        if name in RECORD_FIELDS and name not in own and f"input_{name}" in fields:
            raise RowError(
                "invalid_request",
                f"the columns {name} and input_{name} would both come back as input_{name}; rename one",
            )
    carried = carried_columns(fields)
    return _with_source(given[0], fields[given[0]], sampling, kwargs, carried)


def refuse(fields: dict[str, Any], refused: dict[str, str]) -> None:
    """RowError if a field that we do not honour asks for something; null, false and empty ask for nothing."""
    for name, why in refused.items():
        value = fields.get(name)
        # 0 and 0.0 are values, not absence, although they compare equal to False.
        if value is None or value is False or value in ("", "none", "auto", [], {}):
            continue
        raise RowError("unsupported_parameter", f"{name} is set: {why}", param=name)


def carried_columns(fields: dict[str, Any]) -> dict[str, Any]:
    """The columns that come back in the record, for answers and errors alike."""
    own = _own_names(fields)
    columns = {name: value for name, value in fields.items() if name not in own and name not in NAMES}
    return {f"input_{name}" if name in RECORD_FIELDS else name: value for name, value in columns.items()}


def _own_names(fields: dict[str, Any]) -> frozenset[str]:
    """Fields that mean something to us, sampling parameters apart."""
    ident = id_name(fields)
    return _OWN if ident is None else _OWN | {ident}


def _with_source(
    name: str, value: Any, sampling: dict[str, Any], kwargs: dict[str, Any], carried: dict[str, Any]
) -> LineRequest:
    if name == "messages":
        return LineRequest(messages=check_messages(value), sampling=sampling, template_kwargs=kwargs, carried=carried)
    if kwargs:
        raise RowError(
            "invalid_request", f"chat_template_kwargs goes with messages, not with {name}", param="chat_template_kwargs"
        )
    if name == "token_ids":
        return LineRequest(token_ids=check_token_ids(value, name), sampling=sampling, carried=carried)
    return LineRequest(prompt=check_text(value, name), sampling=sampling, carried=carried)
