"""A row's text: what ends it, what is cut, and that replaying its tokens gives the same state."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchgen_lite.runtime.interface import Finish
from batchgen_lite.sampling_params import SamplingParams
from batchgen_lite.text.row_text import RowText
from batchgen_lite.text.tokenizer import Tokenizer

EOS, IM_END = 2, 3


def feed(tokenizer: Tokenizer, ids: list[int], *, prompt: list[int] | None = None, **params: Any) -> RowText:
    """Feed ids until the row ends."""
    row = RowText(tokenizer, SamplingParams(**params), {EOS}, prompt or [])
    for token_id in ids:
        if row.accept(token_id) is not None:
            break
    return row


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special=False)


def test_eos_ends_without_text_and_is_counted(byte_level: Tokenizer) -> None:
    ids = encode(byte_level, "hello there")
    row = feed(byte_level, [*ids, EOS, 50])
    assert (row.finish, row.text, row.token_ids) == (Finish("stop"), "hello there", [*ids, EOS])


def test_stop_token_ids_are_named(byte_level: Tokenizer) -> None:
    row = feed(byte_level, [*encode(byte_level, "hi"), IM_END], stop_token_ids=[IM_END])
    assert (row.finish, row.text) == (Finish("stop", IM_END), "hi")


def test_ignore_eos_runs_on_but_not_past_stop_token_ids(byte_level: Tokenizer) -> None:
    ids = [*encode(byte_level, "a"), EOS, *encode(byte_level, "b"), IM_END]
    row = feed(byte_level, ids, ignore_eos=True, stop_token_ids=[IM_END])
    assert (row.finish, row.text) == (Finish("stop", IM_END), "ab")
    assert row.stop_ids == {IM_END}
    assert feed(byte_level, [], stop_token_ids=[IM_END]).stop_ids == {EOS, IM_END}
    both = feed(byte_level, ids, ignore_eos=True, stop_token_ids=[EOS])
    assert both.finish == Finish("stop", EOS)


def test_length(byte_level: Tokenizer) -> None:
    ids = encode(byte_level, "abc def ghi")
    row = feed(byte_level, ids, max_tokens=3)
    assert row.finish == Finish("length")
    assert row.text == byte_level.decode(ids[:3])
    eos_last = feed(byte_level, [*ids[:2], EOS], max_tokens=3)
    assert eos_last.finish == Finish("stop")


def test_a_cut_character_shows_as_the_whole_decode_does(byte_level: Tokenizer) -> None:
    ids = [i for t in ("a", "Ã") if (i := byte_level.token_id(t)) is not None]
    row = feed(byte_level, ids, max_tokens=2)
    assert row.text == byte_level.decode(ids) == "a\ufffd"


@pytest.mark.parametrize(("keep", "expected"), [(False, "one "), (True, "one two")])
def test_stop_strings_across_tokens(byte_level: Tokenizer, keep: bool, expected: str) -> None:
    letters = [i for c in "one two three" if (i := byte_level.token_id("Ġ" if c == " " else c)) is not None]
    row = feed(byte_level, letters, stop=["zzz", "two"], include_stop_str_in_output=keep)
    assert (row.finish, row.text) == (Finish("stop", "two"), expected)
    assert len(row.token_ids) == 7  # not one token more than needed


def test_a_stop_string_within_a_token_cuts_the_token(byte_level: Tokenizer) -> None:
    quick = byte_level.token_id("Ġthe")
    assert quick is not None
    row = feed(byte_level, [quick], stop="h")
    assert (row.finish, row.text) == (Finish("stop", "h"), " t")


def test_a_stop_string_of_byte_tokens_ends_at_once(spm: Tokenizer) -> None:
    newline = spm.token_id("<0x0A>")
    assert newline is not None
    row = feed(spm, [*encode(spm, "the"), newline, newline], stop="\n")
    assert (row.finish, row.text, len(row.token_ids)) == (Finish("stop", "\n"), "the", 2)


def test_nothing_counts_before_min_tokens(byte_level: Tokenizer) -> None:
    a, b = (i for t in "ab" if (i := byte_level.token_id(t)) is not None)
    row = feed(byte_level, [a, b, EOS, a, b, a], stop="ab", min_tokens=4)
    assert (row.finish, row.text, len(row.token_ids)) == (Finish("stop", "ab"), "ab", 5)
    eos = feed(byte_level, [EOS, EOS, EOS], min_tokens=2)
    assert (eos.finish, len(eos.token_ids)) == (Finish("stop"), 3)


def test_special_tokens_shown_on_request(byte_level: Tokenizer) -> None:
    ids = [*encode(byte_level, "a"), IM_END, *encode(byte_level, "b"), EOS]
    assert feed(byte_level, ids).text == "ab"
    assert feed(byte_level, ids, skip_special_tokens=False).text == "a<|im_end|>b"
    assert feed(byte_level, ids, skip_special_tokens=False, include_stop_str_in_output=True).text == "a<|im_end|>b<eos>"


def test_no_tokens_after_the_end(byte_level: Tokenizer) -> None:
    row = feed(byte_level, [EOS])
    with pytest.raises(ValueError, match="already ended"):
        row.accept(5)


@given(data=st.data())
def test_replay_and_stream_agree_with_one_go(tokenizer: Tokenizer, data: st.DataObject) -> None:
    """Interrupted anywhere and continued from its tokens a row is the same; streamed pieces add up to its text."""
    size = tokenizer.vocab_size
    ids = data.draw(st.lists(st.one_of(st.integers(4, min(size - 1, 262)), st.integers(0, size - 1)), max_size=30))
    stops = data.draw(st.lists(st.sampled_from(["e", " t", "\n", "he", "a", "st", "\ufffd"]), max_size=3))
    params = SamplingParams(
        stop=stops,
        max_tokens=data.draw(st.integers(5, 40)),
        min_tokens=data.draw(st.integers(0, 5)),
        include_stop_str_in_output=data.draw(st.booleans()),
    )
    whole, streamed = RowText(tokenizer, params, {EOS}), ""
    for token_id in ids:
        finish = whole.accept(token_id)
        streamed += whole.take_text()
        assert streamed == whole.text
        if finish is not None:
            break
    taken = whole.token_ids
    cut = data.draw(st.integers(0, len(taken)))
    again = RowText(tokenizer, params, {EOS}, prior_ids=taken[:cut])
    for token_id in taken[cut:]:
        again.accept(token_id)
    assert (again.text, again.finish, again.token_ids) == (whole.text, whole.finish, taken)


@given(data=st.data())
def test_without_stops_the_text_is_the_decoded_tokens(tokenizer: Tokenizer, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(3, tokenizer.vocab_size - 1), min_size=1, max_size=30))
    row = feed(tokenizer, ids, max_tokens=len(ids))
    assert row.finish == Finish("length")
    assert row.text == tokenizer.decode(ids)
