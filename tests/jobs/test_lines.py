from __future__ import annotations

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchgen_lite.errors import UsageError
from batchgen_lite.jobs.lines import RawLine, read_lines

pieces = st.lists(
    st.sampled_from(
        [b"{}", b"a", b"\r", b"\n", b"\r\n", b" ", b"\xef\xbb\xbf", "\u2028\u2029\x85".encode(), b"\x0c", b"\x00"]
    ),
    max_size=30,
).map(b"".join)


def lines_of(data: bytes, **options: int) -> list[RawLine]:
    return list(read_lines(io.BytesIO(data), **options))


@given(pieces)
def test_lines_are_what_splitting_on_newline_gives(data: bytes) -> None:
    body = data.removeprefix(b"\xef\xbb\xbf")
    expected = [(number, line.removesuffix(b"\r")) for number, line in enumerate(body.split(b"\n"), 1)]
    assert [(line.number, line.data) for line in lines_of(data)] == [(n, line) for n, line in expected if line.strip()]


@given(pieces)
def test_a_line_can_be_read_again_by_its_offset(data: bytes) -> None:
    for line in lines_of(data):
        assert data[line.offset : line.offset + len(line.data)] == line.data
        assert line.offset == 0 or data[line.offset - 1 : line.offset] == b"\n" or line.number == 1


@given(pieces, st.integers(1, 5))
def test_a_cap_cuts_long_lines_and_changes_nothing_else(data: bytes, cap: int) -> None:
    whole = {line.number: line for line in lines_of(data)}
    for line in lines_of(data, max_bytes=cap):
        if not line.oversize:
            assert line == whole[line.number]
        else:
            assert len(line.data) <= cap
    numbers = {line.number for line in lines_of(data, max_bytes=cap)}
    assert whole.keys() <= numbers


@given(pieces)
def test_the_observer_sees_every_byte_once(data: bytes) -> None:
    seen: list[bytes] = []
    list(read_lines(io.BytesIO(data), seen.append, max_bytes=4))
    assert b"".join(seen) == data


def test_a_bom_is_dropped_only_at_the_start() -> None:
    bom = b"\xef\xbb\xbf"
    assert [line.data for line in lines_of(bom + b"a\n" + bom + b"b\n")] == [b"a", bom + b"b"]


def test_physical_numbers_count_blank_lines() -> None:
    assert [line.number for line in lines_of(b"\n  \na\n\r\n\nb")] == [3, 6]


@pytest.mark.parametrize("codec", ["utf-16-le", "utf-16-be"])
def test_utf16_is_refused_as_a_whole(codec: str) -> None:
    with pytest.raises(UsageError, match="UTF-16"):
        lines_of("\ufeff{}\n".encode(codec))
