from __future__ import annotations

import contextlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchgen_lite.errors import RowError
from batchgen_lite.jobs.strict_json import MAX_DEPTH, parse_object

leaves = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
values = leaves | st.lists(leaves, max_size=3) | st.dictionaries(st.text(max_size=3), leaves, max_size=3)


@given(st.dictionaries(st.text(max_size=5), values, max_size=4))
def test_what_json_can_say_is_read_as_json_reads_it(value: dict[str, object]) -> None:
    assert parse_object(json.dumps(value).encode()) == value


@given(st.binary(max_size=40) | st.text(alphabet='{}[]":,0ae\\ ', max_size=12).map(str.encode))
def test_other_bytes_are_a_row_error(data: bytes) -> None:
    with contextlib.suppress(RowError):
        assert isinstance(parse_object(data), dict)


@pytest.mark.parametrize(
    ("line", "code", "words"),
    [
        (b"", "invalid_json", "Expecting value at character 1"),
        (b'{"a": 1,}', "invalid_json", "at character 9"),
        (b'{"a": 1} x', "invalid_json", "Extra data"),
        (b"{'a': 1}", "invalid_json", "double quotes"),
        (b'{"a": NaN}', "invalid_json", "NaN is not JSON"),
        (b'{"a": -Infinity}', "invalid_json", "-Infinity is not JSON"),
        (b'{"a": 1e999}', "invalid_json", "beyond the range"),
        (b'{"a": ' + b"9" * 5000 + b"}", "invalid_json", "too long"),
        (b'{"a": 1, "a": 2}', "invalid_json", "'a' is given twice"),
        (b'{"a": "\xff"}', "invalid_json", "not UTF-8 at byte 8"),
        (b'{"a": "\n"}', "invalid_json", "control character"),
        (b'{"a": ' + b"[" * 100_000, "invalid_json", "nested deeper"),
        (b'{"a": ' + b'{"a":' * 200 + b"1" + b"}" * 201, "invalid_json", "nested deeper"),
        (b"[1]", "invalid_request", "a JSON array"),
        (b"null", "invalid_request", "a JSON null"),
        (b'"{}"', "invalid_request", "a JSON string"),
    ],
)
def test_what_is_wrong_is_said(line: bytes, code: str, words: str) -> None:
    with pytest.raises(RowError, match=words) as caught:
        parse_object(line)
    assert caught.value.code == code
    assert len(str(caught.value)) < 300


def test_depth_counts_brackets_outside_strings_only() -> None:
    text = "[{" * 500 + '\\"'
    assert parse_object(json.dumps({"prompt": text, "list": [[]] * 300}).encode())["prompt"] == text
    deep = b'{"a":' + b"[" * (MAX_DEPTH - 1) + b"]" * (MAX_DEPTH - 1) + b"}"
    assert parse_object(deep)
    with pytest.raises(RowError, match="nested deeper"):
        parse_object(deep.replace(b"[]", b"[[]]"))


def test_unicode_line_ends_inside_strings_are_data() -> None:
    assert parse_object('{"a": "x\u2028y\u0085z"}'.encode()) == {"a": "x\u2028y\u0085z"}


def test_a_hostile_line_costs_no_more_than_its_length() -> None:
    line = b'{"a": ' + b"[" * (MAX_DEPTH // 2) + b'"' + rb"\"{" * 500_000
    with pytest.raises(RowError, match="Unterminated string"):
        parse_object(line)
