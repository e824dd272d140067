"""Tokenizers of model directories: the same ids and text as transformers, and clear refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from batchgen_lite.errors import RowError, TokenizerError
from batchgen_lite.text.tokenizer import Tokenizer, load_tokenizer, stop_ids
from batchgen_lite.text.tokenizer_directory import directory_stop_ids

TEXTS = [
    "Hello, world!",
    "",
    " leading and trailing  ",
    "<bos>typed specials<eos> <think>a</think>",
    "Hé 日本語 🙂\r\n\tx\u2028y",
    "a" * 500,
]


def change_config(root: Path, **values: object) -> None:
    path = root / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"add_bos_token": True},
        {"add_bos_token": False},
        {"add_bos_token": True, "add_eos_token": True},
        {"add_eos_token": False},
    ],
    ids=str,
)
def test_same_ids_as_transformers(byte_level_directory: Path, flags: dict[str, bool]) -> None:
    change_config(byte_level_directory, **flags)
    ours, theirs = load_tokenizer(byte_level_directory), AutoTokenizer.from_pretrained(byte_level_directory)
    for text in TEXTS:
        assert ours.encode(text, add_special=True) == theirs.encode(text)
        ids = ours.encode(text, add_special=False)
        assert ids == theirs.encode(text, add_special_tokens=False)
        for skip in (True, False):
            assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip)
    assert ours.encode_batch(TEXTS, True) == [ours.encode(text, True) for text in TEXTS]
    assert (ours.bos_id, ours.eos_id) == (theirs.bos_token_id, theirs.eos_token_id)
    assert ours.vocab_size == len(theirs)


def test_special_tokens_come_from_every_file(byte_level_directory: Path) -> None:
    """Roles in special_tokens_map.json, tokens in added_tokens_decoder, names that only the config calls special."""
    change_config(
        byte_level_directory,
        unk_token=None,
        additional_special_tokens=["</think>", "<not in the vocabulary>"],
        added_tokens_decoder={"422": {"content": "<new>", "special": True}, "1": {"content": "<bos>"}},
    )
    (byte_level_directory / "special_tokens_map.json").write_text(json.dumps({"pad_token": {"content": "<|im_end|>"}}))
    tokenizer = load_tokenizer(byte_level_directory)
    assert tokenizer.special.pad == tokenizer.token_id("<|im_end|>")
    assert tokenizer.token_id("<new>") == 422
    assert tokenizer.vocab_size == 423
    assert {422, tokenizer.token_id("</think>")} <= tokenizer.special_ids
    assert tokenizer.token_id("<think>") not in tokenizer.special_ids
    assert tokenizer.token_id("<not in the vocabulary>") is None
    assert tokenizer.special_names == {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<|im_end|>"}


def test_an_added_token_at_an_impossible_id_is_refused(byte_level_directory: Path) -> None:
    change_config(byte_level_directory, added_tokens_decoder={"900": {"content": "<far>", "special": True}})
    with pytest.raises(TokenizerError, match=r"900.*do not belong together"):
        load_tokenizer(byte_level_directory)


def test_stop_ids_are_a_union_of_ints_and_lists(byte_level_directory: Path) -> None:
    (byte_level_directory / "config.json").write_text(
        json.dumps({"eos_token_id": 7, "text_config": {"eos_token_id": 8}})
    )
    (byte_level_directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 9]}))
    tokenizer = load_tokenizer(byte_level_directory)
    assert directory_stop_ids(byte_level_directory, tokenizer) == {2, 3, 7, 8, 9}
    assert stop_ids(None, {"eos_token_id": None}, {}) == frozenset()


@pytest.mark.parametrize("value", ["2", [1, "2"], True, -1, {"a": 1}])
def test_damaged_eos_ids_are_refused(value: object) -> None:
    with pytest.raises(TokenizerError, match="eos_token_id"):
        stop_ids(None, {"eos_token_id": value})


def test_templates_file_wins_and_named_templates_are_kept(byte_level_directory: Path) -> None:
    named = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]
    change_config(byte_level_directory, chat_template=named)
    assert load_tokenizer(byte_level_directory).chat_templates == {"default": "a", "tool_use": "b"}
    (byte_level_directory / "chat_template.jinja").write_text("c")
    (byte_level_directory / "additional_chat_templates").mkdir()
    (byte_level_directory / "additional_chat_templates" / "rag.jinja").write_text("d")
    assert load_tokenizer(byte_level_directory).chat_templates == {"default": "c", "tool_use": "b", "rag": "d"}


def test_refusals_say_what_is_wrong(byte_level_directory: Path, tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="neither a model directory"):
        load_tokenizer(tmp_path / "nowhere")
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "tokenizer.model").write_bytes(b"\n\x0b")
    with pytest.raises(TokenizerError, match=r"no tokenizer\.json.*tokenizer\.model"):
        load_tokenizer(empty)
    (byte_level_directory / "tokenizer_config.json").write_text("[1]")
    with pytest.raises(TokenizerError, match="must hold a JSON object"):
        load_tokenizer(byte_level_directory)
    (byte_level_directory / "tokenizer_config.json").write_text("{")
    with pytest.raises(TokenizerError, match="not valid JSON"):
        load_tokenizer(byte_level_directory)
    (byte_level_directory / "tokenizer.json").write_text('{"model": {"type": "Magic"}}')
    (byte_level_directory / "tokenizer_config.json").unlink()
    with pytest.raises(TokenizerError, match="not a usable tokenizer"):
        load_tokenizer(byte_level_directory)


def test_lone_surrogates_are_a_row_error(byte_level: Tokenizer) -> None:
    with pytest.raises(RowError, match="U\\+D800"):
        byte_level.encode(json.loads('"ab\\ud800"'), add_special=False)


@given(text=st.text())
def test_any_text_survives(byte_level: Tokenizer, text: str) -> None:
    """Byte-level tokenizers lose nothing."""
    assert byte_level.decode(byte_level.encode(text, add_special=False), skip_special=False) == text
