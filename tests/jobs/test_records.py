"""Records of both shapes, byte by byte where bytes are promised."""

from __future__ import annotations

import json

from batchgen_lite.jobs.answer import INVALID, Answer, Failure, TokenLogprobs
from batchgen_lite.jobs.envelope import Shape
from batchgen_lite.jobs.record import RowHead, answer_line, encode, failure_line

FLAT = RowHead(3, Shape.FLAT, "a", "m", 1_700_000_000, {"page": 1.5})
CHAT = RowHead(3, Shape.CHAT, "a", "m", 1_700_000_000)
COMPLETION = RowHead(3, Shape.COMPLETION, None, "m", 1_700_000_000)
ANSWER = Answer("né", "stop", "\n", 4, 2)
FAILURE = Failure("invalid_json", "broken", INVALID, None, 17)
SCORED = Answer(
    "né", "length", None, 4, 2,
    logprobs=[TokenLogprobs(1, "n", -0.5, ((1, "n", -0.5), (2, "m", float("-inf")))), TokenLogprobs(2, "\ufffd", -1.0)],
)  # fmt: skip


def test_a_flat_answer_has_these_bytes() -> None:
    assert answer_line(FLAT, ANSWER).decode() == (
        '{"custom_id": "a", "index": 3, "text": "né", "finish_reason": "stop", "stop_reason": "\\n", '
        '"usage": {"prompt_tokens": 4, "completion_tokens": 2, "total_tokens": 6}, "error": null, "page": 1.5}\n'
    )


def test_a_flat_failure_has_these_bytes() -> None:
    assert failure_line(FLAT, FAILURE).decode() == (
        '{"custom_id": "a", "index": 3, "text": null, "finish_reason": null, "stop_reason": null, "usage": null, '
        '"error": {"code": "invalid_json", "message": "broken", "type": "invalid_request_error", "param": null, '
        '"line": 17}, "page": 1.5}\n'
    )


def test_a_chat_answer_is_a_chat_completion() -> None:
    record = json.loads(answer_line(CHAT, ANSWER))
    body = record["response"]["body"]
    assert (record["custom_id"], record["error"], record["response"]["status_code"]) == ("a", None, 200)
    assert (body["object"], body["created"], body["model"]) == ("chat.completion", 1_700_000_000, "m")
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "né"},
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": "\n",
        }
    ]
    assert body["usage"] == {"prompt_tokens": 4, "completion_tokens": 2, "total_tokens": 6}
    assert record["id"].startswith("batch_req_")


def test_reasoning_stands_beside_the_text() -> None:
    answer = Answer("yes", "stop", None, 4, 2, reasoning="hm")
    assert json.loads(answer_line(FLAT, answer))["reasoning"] == "hm"
    message = json.loads(answer_line(CHAT, answer))["response"]["body"]["choices"][0]["message"]
    assert message == {"role": "assistant", "content": "yes", "reasoning": "hm"}


def test_logprobs_in_each_shape_are_json() -> None:
    n = {"token": "n", "token_id": 1, "logprob": -0.5, "bytes": [110]}
    expected = [
        {**n, "top_logprobs": [n, {"token": "m", "token_id": 2, "logprob": -9999.0, "bytes": [109]}]},
        {"token": "\ufffd", "token_id": 2, "logprob": -1.0, "bytes": None, "top_logprobs": []},
    ]
    assert json.loads(answer_line(FLAT, SCORED))["logprobs"] == expected
    chat = json.loads(answer_line(CHAT, SCORED))["response"]["body"]["choices"][0]
    assert chat["logprobs"] == {"content": expected}
    completion = json.loads(answer_line(COMPLETION, SCORED))["response"]["body"]["choices"][0]
    assert completion["text"] == "né"
    assert completion["logprobs"] == {
        "tokens": ["n", "\ufffd"],
        "token_logprobs": [-0.5, -1.0],
        "top_logprobs": [{"n": -0.5, "m": -9999.0}, {}],
        "text_offset": [0, 1],
    }


def test_a_failed_batch_line_keeps_its_shape() -> None:
    record = json.loads(failure_line(CHAT, FAILURE))
    assert (record["custom_id"], record["error"], record["response"]["status_code"]) == ("a", None, 400)
    assert record["response"]["body"]["error"]["code"] == "invalid_json"
    internal = Failure("internal", "x", "server_error")
    assert json.loads(failure_line(CHAT, internal))["response"]["status_code"] == 500


def test_ids_of_records_depend_on_the_row_alone() -> None:
    def ident(head: RowHead) -> str:
        return str(json.loads(answer_line(head, ANSWER))["id"])

    elsewhere = RowHead(9, Shape.CHAT, "a", "m", 5)
    assert ident(CHAT) == ident(elsewhere)
    assert ident(CHAT) != ident(RowHead(3, Shape.CHAT, "b", "m", 5))
    assert ident(COMPLETION) != ident(RowHead(4, Shape.COMPLETION, None, "m", 5))


def test_a_record_is_one_line_for_every_reader() -> None:
    line = encode({"text": "a\nb\u2028c\u2029d\u0085e\x0bf\x1cg", "half": "\ud83d"})
    assert len(line.decode().splitlines()) == 1
    assert json.loads(line) == {"text": "a\nb\u2028c\u2029d\u0085e\x0bf\x1cg", "half": "\ud83d"}
    assert b"\xc3\xa9" in encode({"text": "é"})
