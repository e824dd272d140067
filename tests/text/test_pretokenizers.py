"""Pre-tokenizers by GGUF name: against transformers' own pipelines, and splits that are known to differ."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, pre_tokenizers
from transformers import GPT2Tokenizer, Qwen2Tokenizer
from transformers.convert_slow_tokenizer import TikTokenConverter

from batchgen_lite.errors import TokenizerError
from batchgen_lite.text.pretokenizers import known_pretokenizers, pretokenization

TEXT = "Don't I'LL go  2024年の こんにちは,éaAb!!\n\n x"
MIXED = st.text(alphabet=st.sampled_from(list("aZé'sLl 12½٣年の한.!?/_-<|>🙂\n\r\t\u00a0\u3000\u0301ǅ")), max_size=30)
BUILT = {name: pretokenization(name).build() for name in known_pretokenizers()}
GPT2 = BUILT["gpt-2"]
QWEN2_THEIRS = Qwen2Tokenizer(vocab={"a": 0}, merges=[]).backend_tokenizer
GPT2_THEIRS = GPT2Tokenizer(vocab={"a": 0}, merges=[]).backend_tokenizer
TIKTOKEN = pre_tokenizers.Sequence(
    [
        pre_tokenizers.Split(Regex(TikTokenConverter(vocab_file=None).pattern), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
)


def words(name: str, text: str) -> list[str]:
    """The words before byte mapping: offsets cut from the text (of letters that need no normalisation)."""
    parts = pretokenization(name).build().pre_tokenize_str(text)
    return [text[start:end] for _, (start, end) in parts]


@given(text=MIXED)
@settings(max_examples=20)
def test_nothing_is_lost_or_reordered(text: str) -> None:
    expected = "".join(piece for piece, _ in GPT2.pre_tokenize_str(text))
    for name, pre_tokenizer in BUILT.items():
        assert "".join(piece for piece, _ in pre_tokenizer.pre_tokenize_str(text)) == expected, name


@given(text=MIXED)
def test_qwen2_and_gpt2_are_those_of_transformers(text: str) -> None:
    for name, theirs in (("qwen2", QWEN2_THEIRS), ("gpt-2", GPT2_THEIRS)):
        assert BUILT[name].pre_tokenize_str(text) == theirs.pre_tokenizer.pre_tokenize_str(text)
    normalizer = pretokenization("qwen2").normalizer()
    assert normalizer is not None
    assert normalizer.normalize_str(text) == QWEN2_THEIRS.normalizer.normalize_str(text)


@given(text=MIXED)
def test_llama3_is_the_tiktoken_pattern(text: str) -> None:
    assert BUILT["llama-bpe"].pre_tokenize_str(text) == TIKTOKEN.pre_tokenize_str(text)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("gpt-2", "Don|'t| I|'|LL| go| | 2024|年の| こんにちは|,|éaAb|!!|\n\n| x"),
        ("llama-bpe", "Don|'t| I|'LL| go| | |202|4|年の| こんにちは|,éaAb|!!\n\n| x"),
        ("qwen2", "Don|'t| I|'LL| go| | |2|0|2|4|年の| こんにちは|,éaAb|!!\n\n| x"),
        ("gpt-4o", "Don't| I'LL| go| | |202|4|年の| こんにちは|,éa|Ab|!!\n\n| x"),
        ("tekken", "Don|'t| I|'LL| go| | |2|0|2|4|年の| こんにちは|,éa|Ab|!!\n\n| x"),
        ("smollm", "Don|'t| I|'|LL| go|  |2|0|2|4|年の| こんにちは|,|éaAb|!!|\n\n| x"),
        ("deepseek-v3", "Don|'t| I|'LL| go|  |202|4|年の| |こんにちは|,|éaAb|!!\n\n| x"),
        # Its class of signs runs from ":" to "~" and so has the ASCII letters too, as published.
        ("deepseek-llm", "Don|'|t| I|'|LL| go|  |2|0|2|4|年の| |こんにちは|,|é|aAb|!!|\n|\n| x"),
        ("bloom", "Don't| I'LL| go| | 2024年の| こんにちは|,|éaAb|!!\n\n| x"),
    ],
)
def test_known_splits(name: str, expected: str) -> None:
    assert "|".join(words(name, TEXT)) == expected


def test_unknown_names_are_refused_by_name() -> None:
    with pytest.raises(TokenizerError, match=r"'made-up'.*known are a\.x-4\.0"):
        pretokenization("made-up")
    with pytest.raises(TokenizerError, match="convert the model again"):
        pretokenization(None)
