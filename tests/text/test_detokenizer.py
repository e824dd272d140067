"""Incremental detokenisation: whole characters, and the pieces add up to the whole, for any ids."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_tokenizers import spm_tokenizer, train_byte_level
from tokenizers import decoders

from batchgen_lite.errors import TokenizerError
from batchgen_lite.text.detokenizer import Detokenizer, check_decoder
from batchgen_lite.text.tokenizer import SpecialTokens, Tokenizer

TEXTS = ["Hé 日本語 🙂🙃 straße", "the stop\n\n  capital", "", " <bos>", "👨‍👩‍👧‍👦 e\u0301"]


def pieces(tokenizer: Tokenizer, ids: list[int], *, skip: bool) -> list[str]:
    detokenizer = Detokenizer(tokenizer, skip_special=skip)
    return [*(detokenizer.push(i) for i in ids), detokenizer.flush()]


@pytest.mark.parametrize("skip", [True, False])
@given(data=st.data())
def test_pieces_add_up_to_the_whole(tokenizer: Tokenizer, skip: bool, data: st.DataObject) -> None:
    """Any ids: invalid UTF-8, byte tokens in every order, specials, ids beyond the vocabulary."""
    size = tokenizer.vocab_size
    low = st.integers(0, min(262, size - 1))  # where the bytes and specials are
    ids = data.draw(st.lists(st.one_of(st.integers(0, size + 2), low), max_size=40))
    assert "".join(pieces(tokenizer, ids, skip=skip)) == tokenizer.decode(ids, skip)


@given(text=st.one_of(st.text(max_size=40), st.sampled_from(TEXTS)))
def test_no_character_is_split(byte_level: Tokenizer, text: str) -> None:
    """Of valid text no piece ever shows a replacement character that the text does not have."""
    shown = pieces(byte_level, byte_level.encode(text, add_special=False), skip=False)
    assert "".join(shown) == text
    assert "".join(shown).count("\ufffd") == text.count("\ufffd")


@given(data=st.data())
def test_pending_is_what_flush_gives(tokenizer: Tokenizer, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=20))
    for end in range(len(ids) + 1):
        detokenizer = Detokenizer(tokenizer)
        for i in ids[:end]:
            detokenizer.push(i)
        pending = detokenizer.pending()
        assert pending == detokenizer.pending()
        assert pending in ("", detokenizer.flush())


def test_text_comes_as_soon_as_it_is_certain(byte_level: Tokenizer) -> None:
    ids = [byte_level.token_id(t) for t in ("a", "Ã", "©", "b")]
    assert pieces(byte_level, [i for i in ids if i is not None], skip=True) == ["a", "", "é", "b", ""]


def test_byte_tokens_wait_for_their_run(spm: Tokenizer) -> None:
    ids = [spm.token_id(t) for t in ("\u2581the", "<0xE6>", "<0x97>", "<0xA5>", "\u2581a")]
    assert pieces(spm, [i for i in ids if i is not None], skip=True) == ["the", "", "", "", "日 a", ""]
    newline = Detokenizer(spm)
    assert newline.push(spm.token_id("<0x0A>") or -1) == ""
    assert newline.pending() == "\n"


@given(ids=st.lists(st.sampled_from([1, 3 + 0x0A, 3 + 0xC3, 3 + 0xA9, 261, 271, 300]), max_size=12))
def test_several_leading_characters_are_stripped_once(ids: list[int]) -> None:
    tokenizer = spm_tokenizer()
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 3, 0)]
    tokenizer.backend.decoder = decoders.Sequence(steps)
    assert tokenizer.token(271) == "\u2581\u2581"
    assert "".join(pieces(tokenizer, ids, skip=True)) == tokenizer.decode(ids)


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.WordPiece(),
        decoders.BPEDecoder(),
        decoders.Sequence([decoders.ByteFallback(), decoders.ByteLevel()]),
        decoders.Strip(" ", 0, 1),
        None,
    ],
    ids=["wordpiece", "suffix", "bytes twice", "strip at the end", "none"],
)
def test_unsupported_decoders_are_refused_by_name(decoder: object) -> None:
    backend = train_byte_level()
    backend.decoder = decoder
    with pytest.raises(TokenizerError, match="decoder"):
        check_decoder(Tokenizer(backend, SpecialTokens()))
