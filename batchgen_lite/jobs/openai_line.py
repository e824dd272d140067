"""OpenAI batch lines: ``{"custom_id", "method", "url", "body"}`` for chat completions and completions."""

from __future__ import annotations

from typing import Any

from batchgen_lite.errors import ParameterError, RowError
from batchgen_lite.jobs.envelope import Shape
from batchgen_lite.jobs.flat_line import refuse
from batchgen_lite.jobs.request import LineRequest, check_kwargs, check_messages, check_text, check_token_ids
from batchgen_lite.sampling_mapping import NAMES, UNSUPPORTED, canonical, similar_name, unknown_name

URLS = ("/v1/chat/completions", "/v1/completions")

_TOP_LEVEL = ("custom_id", "id", "method", "url", "body")

# Accepted and without effect on the answer: they address a service, not a model. ``model`` is whatever we run.
_NO_EFFECT = frozenset(
    {"model", "user", "metadata", "store", "service_tier", "stream_options", "parallel_tool_calls", "safety_identifier"}
    | {"prompt_cache_key"}
)

_REFUSED = {
    "stream": "streaming is not possible in a batch; remove it",
    "tools": "tool calls are not supported; remove it",
    "tool_choice": "tool calls are not supported; remove it",
    "functions": "tool calls are not supported; remove it",
    "function_call": "tool calls are not supported; remove it",
    "audio": "only text is supported; remove it",
    "prediction": "predicted outputs are not supported; remove it",
    "web_search_options": "web search is not supported; remove it",
    "echo": "the prompt is never repeated in the text; remove it",
    "suffix": "insertion is not supported; remove it",
}


def read(fields: dict[str, Any], shape: Shape) -> LineRequest:
    """RowError or ParameterError for what cannot be honoured."""
    body = _check_frame(fields)
    refuse(body, _REFUSED)
    _check_neutral(body)
    source = "messages" if shape is Shape.CHAT else "prompt"
    kwargs = check_kwargs(body.get("chat_template_kwargs"), "body.chat_template_kwargs")
    if isinstance(body.get("reasoning_effort"), str):  # a variable of gpt-oss's template, as in vLLM
        kwargs = {"reasoning_effort": body["reasoning_effort"], **kwargs}
    known = _NO_EFFECT | {source, "chat_template_kwargs", "reasoning_effort", "response_format", "modalities"}
    known |= {"best_of"} | _REFUSED.keys()
    sampling = _sampling({name: value for name, value in body.items() if name not in known})
    if shape is Shape.CHAT:
        return LineRequest(
            messages=check_messages(body.get("messages"), "body.messages"), sampling=sampling, template_kwargs=kwargs
        )
    return _completion(body.get("prompt"), sampling)


def _check_frame(fields: dict[str, Any]) -> dict[str, Any]:
    for name in fields:
        if name not in _TOP_LEVEL:
            near = f"; {name} belongs into body" if name in NAMES or name in ("messages", "prompt", "model") else ""
            raise RowError("invalid_request", f"unknown field {name[:60]!r} of a batch line{near}", param=name[:60])
    method = fields.get("method", "POST")
    if method != "POST":
        raise RowError("invalid_request", f"method is {str(method)[:40]!r}: it must be 'POST'", param="method")
    url = fields.get("url")
    if url is not None and url not in URLS:
        raise RowError("unsupported_url", f"url is {str(url)[:80]!r}: supported are {' and '.join(URLS)}", param="url")
    body = fields.get("body")
    if not isinstance(body, dict):
        raise RowError("invalid_request", "body is absent or no object: it must hold the request", param="body")
    return body


def _check_neutral(body: dict[str, Any]) -> None:
    """Parameters of which only the value without effect is supported."""
    response_format = body.get("response_format")
    if response_format is not None and response_format != {"type": "text"}:
        raise RowError(
            "unsupported_parameter", "response_format: only {'type': 'text'} is supported", param="response_format"
        )
    if body.get("modalities") not in (None, ["text"]):
        raise RowError("unsupported_parameter", "modalities: only ['text'] is supported", param="modalities")
    if body.get("best_of") not in (None, 1):
        raise RowError("unsupported_parameter", "best_of: only 1 is supported", param="best_of")


def _sampling(fields: dict[str, Any]) -> dict[str, Any]:
    """Everything else in a body must be a sampling parameter: a body has no free columns."""
    for name in fields:
        if name in NAMES:
            continue
        near = similar_name(name)
        if near is None and name not in UNSUPPORTED:
            raise ParameterError(
                f"unknown parameter {name[:60]!r} in body; remove it", param=name[:60], code="unsupported_parameter"
            )
        raise unknown_name(name, near)
    return canonical(fields)


def _completion(prompt: Any, sampling: dict[str, Any]) -> LineRequest:
    name = "body.prompt"
    if isinstance(prompt, list):
        if prompt and all(isinstance(item, str) for item in prompt):
            if len(prompt) > 1:
                raise RowError(
                    "unsupported_parameter",
                    f"{name} holds {len(prompt)} prompts; give each a line of its own",
                    param=name,
                )
            prompt = prompt[0]
        elif len(prompt) == 1 and isinstance(prompt[0], list):
            prompt = prompt[0]
    if isinstance(prompt, list):
        return LineRequest(token_ids=check_token_ids(prompt, name), sampling=sampling)
    return LineRequest(prompt=check_text(prompt, name), sampling=sampling)
