"""Reasoning split from the answer: think blocks as tokens or as text, and gpt-oss channels."""

from __future__ import annotations

from typing import Any

import pytest
from tiny_tokenizers import train_byte_level
from tokenizers import AddedToken

from batchgen_lite.sampling_params import SamplingParams
from batchgen_lite.text.row_text import RowText
from batchgen_lite.text.tokenizer import SpecialTokens, Tokenizer
from batchgen_lite.text.tokenizer_gguf import tokenizer_from_metadata

EOS = 2
CHANNEL_MARKS = ["<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>"]


@pytest.fixture(scope="module")
def harmony() -> Tokenizer:
    backend = train_byte_level()
    backend.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in CHANNEL_MARKS])
    return Tokenizer(backend, SpecialTokens(eos=EOS, eos_ids=frozenset({EOS})))


@pytest.fixture(scope="module")
def marks_as_text() -> Tokenizer:
    """A vocabulary without think tokens: the marks come letter by letter."""
    from tokenizers import pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = ["<unk>", "<bos>", "<eos>", *letters, "th"]
    return tokenizer_from_metadata(
        {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "gpt-2",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": [2, 3, 3] + [1] * (len(tokens) - 3),
            "tokenizer.ggml.merges": ["t h"],
            "tokenizer.ggml.eos_token_id": EOS,
        }
    )


def run(tokenizer: Tokenizer, output: str, mode: str = "split", prompt: str = "", **params: Any) -> RowText:
    ids = [*tokenizer.encode(output, add_special=False), EOS]
    stops = {EOS, *(i for mark in ("<|return|>", "<|call|>") if (i := tokenizer.token_id(mark)) is not None)}
    row = RowText(
        tokenizer,
        SamplingParams(max_tokens=1000, **params),
        stops,
        tokenizer.encode(prompt, add_special=False),
        reasoning=mode,
    )
    for token_id in ids:
        if row.accept(token_id) is not None:
            break
    return row


@pytest.fixture(params=["tokens", "text"])
def thinker(request: pytest.FixtureRequest, byte_level: Tokenizer, marks_as_text: Tokenizer) -> Tokenizer:
    return byte_level if request.param == "tokens" else marks_as_text


@pytest.mark.parametrize(
    ("prompt", "output", "text", "reasoning"),
    [
        ("", "<think>\nlet me see\n</think>\n\nParis", "Paris", "let me see"),
        ("", "no thoughts\n", "no thoughts\n", None),
        ("user: <think>\n", "let me see</think>Paris", "Paris", "let me see"),
        ("", "never opened</think>\n\nParis 🙂", "Paris 🙂", "never opened"),
        ("", "<think>\n\n</think>\n\nParis", "Paris", None),
        ("", "<think>cut off in the mid", "", "cut off in the mid"),
        ("<think>\nold\n</think>\n\nassistant:", "Paris", "Paris", None),
        ("assistant: <think>\n", "cut off", "", "cut off"),
    ],
)
def test_think_blocks(thinker: Tokenizer, prompt: str, output: str, text: str, reasoning: str | None) -> None:
    row = run(thinker, output, prompt=prompt)
    assert (row.text, row.reasoning) == (text, reasoning)


def test_modes(byte_level: Tokenizer) -> None:
    output = "<think>why</think>because"
    assert (run(byte_level, output, "keep").text, run(byte_level, output, "keep").reasoning) == (output, None)
    assert (run(byte_level, output, "drop").text, run(byte_level, output, "drop").reasoning) == ("because", None)


def test_stop_strings_cut_before_the_split(byte_level: Tokenizer) -> None:
    row = run(byte_level, "<think>why</think>because of it", stop=" of")
    assert (row.text, row.reasoning) == ("because", "why")
    inside = run(byte_level, "<think>why not</think>because", stop=" not")
    assert (inside.text, inside.reasoning) == ("", "why")


@pytest.mark.parametrize(
    ("prompt", "output", "text", "reasoning"),
    [
        (
            "<|start|>user<|message|>hi<|end|><|start|>assistant",
            "<|channel|>analysis<|message|>hm 日<|end|><|start|>assistant<|channel|>final<|message|>Paris<|return|>",
            "Paris",
            "hm 日",
        ),
        (
            "<|start|>assistant",
            "<|channel|>analysis<|message|>I call<|end|><|start|>assistant<|channel|>commentary to=f"
            "<|message|>{}<|call|>",
            "",
            "I call{}",
        ),
        ("<|start|>assistant<|channel|>analysis<|message|>", "thinking on", "", "thinking on"),
        ("<|start|>assistant<|channel|>final<|message|>", "Paris", "Paris", None),
        ("<|start|>assistant", "plain text without a channel", "plain text without a channel", None),
    ],
)
def test_channels(harmony: Tokenizer, prompt: str, output: str, text: str, reasoning: str | None) -> None:
    row = run(harmony, output, prompt=prompt)
    assert (row.text, row.reasoning) == (text, reasoning)
