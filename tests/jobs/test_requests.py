"""What lines of both shapes ask for, and every way to ask wrongly."""

from __future__ import annotations

import json
from typing import Any

import pytest

from batchgen_lite.errors import RowError
from batchgen_lite.jobs.envelope import Shape, open_envelope
from batchgen_lite.jobs.request import LineRequest, read_request

HELLO = [{"role": "user", "content": "hello"}]


def request(**fields: Any) -> LineRequest:
    return read_request(open_envelope(json.dumps(fields).encode()))


def batch(**body: Any) -> LineRequest:
    return request(custom_id="a", method="POST", url="/v1/chat/completions", body={"model": "m", **body})


def test_a_flat_line_splits_into_prompt_sampling_and_columns() -> None:
    found = request(prompt="hi", custom_id="a", temperature=0, max_new_tokens=5, top_p=None, source={"page": 1.5}, id=3)
    assert found == LineRequest(
        prompt="hi", sampling={"temperature": 0, "max_tokens": 5}, carried={"source": {"page": 1.5}, "id": 3}
    )


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"text": "hi"}, {"prompt": "hi"}),
        ({"token_ids": [1, 2]}, {"token_ids": [1, 2]}),
        ({"messages": HELLO}, {"messages": HELLO}),
        ({"prompt": "hi", "messages": None}, {"prompt": "hi"}),
        ({"prompt": ""}, {"prompt": ""}),
        ({"messages": HELLO, "chat_template_kwargs": {"x": 1}}, {"messages": HELLO, "template_kwargs": {"x": 1}}),
        ({"prompt": "hi", "stream": False, "tools": []}, {"prompt": "hi"}),
        ({"prompt": "hi", "logprobs": True, "top_logprobs": 2}, {"prompt": "hi", "sampling": {"logprobs": 2}}),
    ],
)
def test_flat_lines_that_are_right(fields: dict[str, Any], expected: dict[str, Any]) -> None:
    assert request(**fields) == LineRequest(**expected)


def test_columns_named_as_record_fields_come_back_under_another_name() -> None:
    found = request(prompt="hi", index=4, error="none", usage=1)
    assert found.carried == {"input_index": 4, "input_error": "none", "input_usage": 1}
    with pytest.raises(RowError, match="input_index"):
        request(prompt="hi", index=4, input_index=5)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, ""),
        ("x", "x"),
        ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "a\nb"),
        (["a", {"type": "text", "text": "b"}], "a\nb"),
        ([], ""),
    ],
)
def test_contents_become_strings(content: Any, expected: str) -> None:
    found = request(messages=[{"role": "user", "content": content, "name": "n"}])
    assert found.messages == [{"role": "user", "content": expected, "name": "n"}]


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({}, "invalid_request", None),
        ({"prompt": None}, "invalid_request", None),
        ({"prompt": "a", "text": "b"}, "invalid_request", None),
        ({"prompt": 5}, "invalid_request", "prompt"),
        ({"prompt": ["a"]}, "invalid_request", "prompt"),
        ({"prompt": "\ud800"}, "invalid_request", "prompt"),
        ({"token_ids": []}, "invalid_request", "token_ids"),
        ({"token_ids": [1, True]}, "invalid_request", "token_ids[1]"),
        ({"token_ids": [1.0]}, "invalid_request", "token_ids[0]"),
        ({"token_ids": [-1]}, "invalid_request", "token_ids[0]"),
        ({"token_ids": [2**31]}, "invalid_request", "token_ids[0]"),
        ({"messages": []}, "invalid_request", "messages"),
        ({"messages": "hello"}, "invalid_request", "messages"),
        ({"messages": ["hello"]}, "invalid_request", "messages[0]"),
        ({"messages": [{"content": "x"}]}, "invalid_request", "messages[0].role"),
        ({"messages": [{"role": "", "content": "x"}]}, "invalid_request", "messages[0].role"),
        ({"messages": [{"role": "user", "content": 5}]}, "invalid_request", "messages[0].content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]},
            "unsupported_content",
            "messages[0].content[0]",
        ),
        ({"messages": [{"role": "user", "content": [7]}]}, "unsupported_content", "messages[0].content[0]"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            "invalid_request",
            "messages[0].content[0].text",
        ),
        ({"prompt": "a", "temprature": 1}, "unsupported_parameter", "temprature"),
        ({"prompt": "a", "maxTokens": 1}, "unsupported_parameter", "maxTokens"),
        ({"prompt": "a", "num_beams": 4}, "unsupported_parameter", "num_beams"),
        ({"prompt": "a", "response_format": {"type": "json_object"}}, "unsupported_parameter", "response_format"),
        ({"prompt": "a", "stream": True}, "unsupported_parameter", "stream"),
        ({"prompt": "a", "stream": 0}, "unsupported_parameter", "stream"),
        ({"prompt": "a", "tools": [{"type": "function"}]}, "unsupported_parameter", "tools"),
        ({"prompt": "a", "max_tokens": 1, "max_new_tokens": 2}, "invalid_request", "max_new_tokens"),
        ({"prompt": "a", "chat_template_kwargs": {"a": 1}}, "invalid_request", "chat_template_kwargs"),
        ({"messages": HELLO, "chat_template_kwargs": [1]}, "invalid_request", "chat_template_kwargs"),
        ({"prompt": "a", "custom_id": 1.5}, "invalid_request", "custom_id"),
        ({"prompt": "a", "custom_id": True}, "invalid_request", "custom_id"),
        ({"prompt": "a", "id": ["x"]}, "invalid_request", "id"),
    ],
)
def test_flat_lines_that_are_wrong(fields: dict[str, Any], code: str, param: str | None) -> None:
    with pytest.raises(RowError) as caught:
        request(**fields)
    assert (caught.value.code, caught.value.param) == (code, param)


def test_a_chat_line() -> None:
    found = batch(messages=HELLO, max_completion_tokens=9, logprobs=True, user="u", stream=False, n=1, store=True)
    assert found == LineRequest(messages=HELLO, sampling={"max_tokens": 9, "logprobs": 0, "n": 1})


def test_reasoning_effort_is_a_template_variable() -> None:
    assert batch(messages=HELLO, reasoning_effort="low").template_kwargs == {"reasoning_effort": "low"}


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a", {"prompt": "a"}),
        (["a"], {"prompt": "a"}),
        ([1, 2], {"token_ids": [1, 2]}),
        ([[1, 2]], {"token_ids": [1, 2]}),
    ],
)
def test_completion_prompts(prompt: Any, expected: dict[str, Any]) -> None:
    body = {"prompt": prompt, "echo": False, "best_of": 1}
    assert request(url="/v1/completions", body=body) == LineRequest(**expected)
    assert request(custom_id="x", body=body) == LineRequest(**expected)


@pytest.mark.parametrize(
    ("fields", "shape"),
    [
        ({"prompt": "a"}, Shape.FLAT),
        ({"prompt": "a", "url": "https://x.org", "body": "text"}, Shape.FLAT),
        ({"body": {"messages": HELLO}}, Shape.CHAT),
        ({"body": {"prompt": "a"}}, Shape.COMPLETION),
        ({"url": "/v1/completions", "body": {}}, Shape.COMPLETION),
        ({"url": "/v1/chat/completions"}, Shape.CHAT),
        ({"url": "/v1/embeddings", "body": {"input": "a"}}, Shape.CHAT),
    ],
)
def test_shapes_are_told_apart(fields: dict[str, Any], shape: Shape) -> None:
    assert open_envelope(json.dumps(fields).encode()).shape is shape


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"method": "GET", "body": {"messages": HELLO}}, "invalid_request", "method"),
        ({"url": "/v1/embeddings", "body": {"input": "a"}}, "unsupported_url", "url"),
        ({"url": "/v1/chat/completions"}, "invalid_request", "body"),
        ({"url": "/v1/chat/completions", "body": "x"}, "invalid_request", "body"),
        ({"body": {"messages": HELLO}, "temperature": 1}, "invalid_request", "temperature"),
        ({"body": {"messages": HELLO, "extra": 1}}, "unsupported_parameter", "extra"),
        ({"body": {"messages": HELLO, "temprature": 1}}, "unsupported_parameter", "temprature"),
        ({"body": {"messages": HELLO, "stream": True}}, "unsupported_parameter", "stream"),
        ({"body": {"messages": HELLO, "tools": [{}]}}, "unsupported_parameter", "tools"),
        ({"body": {"messages": HELLO, "tool_choice": "required"}}, "unsupported_parameter", "tool_choice"),
        ({"body": {"messages": HELLO, "modalities": ["text", "audio"]}}, "unsupported_parameter", "modalities"),
        (
            {"body": {"messages": HELLO, "response_format": {"type": "json_object"}}},
            "unsupported_parameter",
            "response_format",
        ),
        ({"body": {"prompt": "a", "best_of": 2}}, "unsupported_parameter", "best_of"),
        ({"body": {"prompt": "a", "echo": True}}, "unsupported_parameter", "echo"),
        ({"body": {"prompt": ["a", "b"]}}, "unsupported_parameter", "body.prompt"),
        ({"body": {"prompt": [[1], [2]]}}, "invalid_request", "body.prompt[0]"),
        ({"url": "/v1/completions", "body": {}}, "invalid_request", "body.prompt"),
        ({"url": "/v1/chat/completions", "body": {"prompt": "a"}}, "unsupported_parameter", "prompt"),
    ],
)
def test_batch_lines_that_are_wrong(fields: dict[str, Any], code: str, param: str) -> None:
    with pytest.raises(RowError) as caught:
        request(**fields)
    assert (caught.value.code, caught.value.param) == (code, param)
