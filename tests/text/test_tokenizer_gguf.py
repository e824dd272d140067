"""Tokenizers from GGUF metadata: the same ids as the tokenizer they were converted from."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import gguf
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_tokenizers import CORPUS, spm_pieces, train_byte_level
from tokenizers import Tokenizer as Backend
from transformers import LlamaTokenizer
from transformers.tokenization_utils_base import generate_merges

from batchgen_lite.errors import CheckpointError, TokenizerError
from batchgen_lite.text.tokenizer import Tokenizer, load_tokenizer
from batchgen_lite.text.tokenizer_gguf import tokenizer_from_metadata


def byte_level_metadata(backend: Backend, **changes: Any) -> dict[str, Any]:
    """As llama.cpp's converter writes it: specials are control tokens, other added tokens user-defined."""
    added = backend.get_added_tokens_decoder()
    tokens = [backend.id_to_token(i) for i in range(backend.get_vocab_size())]
    types = [1 if i not in added else 3 if added[i].special else 4 for i in range(len(tokens))]
    merges = [" ".join(m) if isinstance(m, list) else m for m in json.loads(backend.to_str())["model"]["merges"]]
    prefix = "tokenizer.ggml."
    metadata = {
        prefix + "model": "gpt2",
        prefix + "pre": "gpt-2",
        prefix + "tokens": tokens,
        prefix + "token_type": types,
        prefix + "merges": merges,
        prefix + "bos_token_id": 1,
        prefix + "eos_token_id": 2,
        prefix + "padding_token_id": 2**32 - 1,
        "tokenizer.chat_template": "{{ messages }}",
        "tokenizer.chat_template.tool_use": "tools",
    }
    return metadata | {(k if k.startswith("tokenizer") else prefix + k): v for k, v in changes.items()}


ORIGINAL = train_byte_level()
CONVERTED = tokenizer_from_metadata(byte_level_metadata(ORIGINAL))


@given(text=st.one_of(st.text(), st.sampled_from(CORPUS), st.text(alphabet="ab <>bostheink/|_\n ")))
def test_byte_level_ids_are_those_of_the_original(text: str) -> None:
    expected = ORIGINAL.encode(text, add_special_tokens=False).ids
    assert CONVERTED.encode(text, add_special=False) == expected
    assert CONVERTED.decode(expected) == ORIGINAL.decode(expected)


def test_special_tokens_templates_and_names() -> None:
    tokenizer = CONVERTED
    assert tokenizer.special_ids == {0, 1, 2, 3}
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.special.pad) == (1, 2, None)
    # <|im_end|> ends a turn in every model that has it, whatever the file calls EOS.
    assert tokenizer.special.eos_ids == {2, 3}
    assert tokenizer.chat_templates == {"default": "{{ messages }}", "tool_use": "tools"}
    assert tokenizer.special_names == {"bos_token": "<bos>", "eos_token": "<eos>"}
    assert tokenizer.encode("a", add_special=True)[0] != 1


def test_bos_and_eos_as_the_file_says() -> None:
    both = tokenizer_from_metadata(byte_level_metadata(ORIGINAL, add_bos_token=True, add_eos_token=True))
    ids = both.encode("hi", add_special=True)
    assert (ids[0], ids[-1]) == (1, 2)
    assert ids[1:-1] == both.encode("hi", add_special=False)
    llama3 = tokenizer_from_metadata(byte_level_metadata(ORIGINAL, pre="llama-bpe"))
    assert llama3.encode("hi", add_special=True)[0] == 1


def sentencepiece_metadata() -> dict[str, Any]:
    pieces, scores = spm_pieces()
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": pieces,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * (len(pieces) - 259),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


def sentencepiece_by_hand(text: str) -> list[str]:
    """SentencePiece's BPE as its paper has it: join the adjacent pair whose union has the best score, leftmost first;
    what stays a single unknown character becomes its bytes."""
    pieces, scores = spm_pieces()
    rank = dict(zip(pieces, scores, strict=True))
    parts = list(("\u2581" + text.replace(" ", "\u2581")) if text else "")
    while True:
        pairs = [(-rank[a + b], i) for i, (a, b) in enumerate(itertools.pairwise(parts)) if a + b in rank]
        if not pairs:
            break
        _, i = min(pairs)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    return [out for part in parts for out in ([part] if part in rank else [f"<0x{b:02X}>" for b in part.encode()])]


SPM = tokenizer_from_metadata(sentencepiece_metadata())


@given(text=st.one_of(st.sampled_from(CORPUS), st.text(alphabet="the capitol stop \n日🙂", max_size=30)))
def test_sentencepiece_ids_follow_the_algorithm(text: str) -> None:
    assert [SPM.token(i) for i in SPM.encode(text, add_special=False)] == sentencepiece_by_hand(text)


def test_sentencepiece_agrees_with_transformers() -> None:
    """But for texts that begin with a space, where its Metaspace adds no second one, unlike SentencePiece."""
    pieces, scores = spm_pieces()
    vocab = {piece: i for i, piece in enumerate(pieces)}
    merges = generate_merges(vocab, dict(zip(pieces, scores, strict=True)))
    theirs = LlamaTokenizer(vocab=vocab, merges=merges)
    for text in [*CORPUS, "the stop  of the capital", "日本 the"]:
        ids = SPM.encode(text, add_special=False)
        assert ids == theirs.encode(text, add_special_tokens=False)
        assert SPM.decode(ids) == theirs.decode(ids)


def test_sentencepiece_adds_bos_and_keeps_spaces() -> None:
    assert SPM.encode("the", add_special=True)[0] == 1
    assert SPM.decode(SPM.encode("  the stop", add_special=False)) == "  the stop"


def test_from_a_file(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    metadata = byte_level_metadata(ORIGINAL)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(metadata["tokenizer.ggml.tokens"])
    writer.add_token_types(metadata["tokenizer.ggml.token_type"])
    writer.add_token_merges(metadata["tokenizer.ggml.merges"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    tokenizer = load_tokenizer(tmp_path / "m.gguf")
    for text in CORPUS:
        assert tokenizer.encode(text, False) == ORIGINAL.encode(text, add_special_tokens=False).ids
    assert tokenizer.special == CONVERTED.special
    (tmp_path / "cut.gguf").write_bytes((tmp_path / "m.gguf").read_bytes()[:2000])
    with pytest.raises(CheckpointError):
        load_tokenizer(tmp_path / "cut.gguf")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "t5"}, "'t5'"),
        ({"pre": "brand-new"}, "unknown pre-tokenizer 'brand-new'"),
        ({"pre": None}, "does not name its pre-tokenizer"),
        ({"tokens": None}, "no usable tokenizer.ggml.tokens"),
        ({"tokens": ["a", "a"]}, "duplicates"),
        ({"token_type": [1]}, "token_type has 1"),
        ({"merges": ["qq zz"]}, "qq zz"),
        ({"merges": ["nospace"]}, "nospace"),
        ({"model": "llama", "scores": [0.0]}, "scores has 1"),
    ],
)
def test_refusals_name_what_is_wrong(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(TokenizerError, match=message):
        tokenizer_from_metadata(byte_level_metadata(ORIGINAL, **changes))


def test_channel_models_do_not_stop_at_the_end_of_a_channel() -> None:
    tokens = ["a", "<|end|>", "<|return|>", "<|call|>"]
    base = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-4o",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1, 3, 3, 3],
        "tokenizer.ggml.merges": ["a a"],
        "tokenizer.ggml.eos_token_id": 2,
    }
    with_merge = base | {"tokenizer.ggml.tokens": [*tokens, "aa"], "tokenizer.ggml.token_type": [1, 3, 3, 3, 1]}
    tokenizer: Tokenizer = tokenizer_from_metadata(with_merge)
    assert tokenizer.special.eos_ids == {2, 3}
