"""Tokenizers from GGUF metadata: byte-level BPE ("gpt2") and SentencePiece BPE ("llama").

Keys: ``tokenizer.ggml.model``, ``.tokens``, ``.token_type``, ``.merges`` (gpt2), ``.scores`` (llama), ``.pre`` and the
``*_token_id`` entries; ``tokenizer.chat_template`` and ``tokenizer.chat_template.NAME``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as Backend

from batchgen_lite.errors import TokenizerError
from batchgen_lite.text.pretokenizers import pretokenization
from batchgen_lite.text.sentencepiece_bpe import sentencepiece_backend
from batchgen_lite.text.tokenizer import SpecialTokens, Tokenizer

_PREFIX = "tokenizer."
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6

# GGUF names one EOS and perhaps an end of turn; models end a turn with any of these control tokens. "<|end|>" only
# separates channels where "<|return|>" exists.
_TURN_ENDS = (
    "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|endoftext|>", "<|end_of_text|>", "<end_of_turn>", "<|return|>",
    "<|call|>", "<|end|>", "<\uff5cend\u2581of\u2581sentence\uff5c>", "</s>",
    "<|endofturn|>", "<|END_OF_TURN_TOKEN|>", "<|eot|>",
)  # fmt: skip


def read_tokenizer_metadata(path: Path) -> dict[str, Any]:
    """The ``tokenizer.*`` entries of a GGUF file. Raises CheckpointError when it cannot be read."""
    from batchgen_lite.offload.checkpoint.gguf_header import read_header  # numpy: only for GGUF files

    metadata = read_header(path, path.stat().st_size).metadata
    return {name: value for name, value in metadata.items() if name.startswith(_PREFIX)}


def tokenizer_from_metadata(metadata: Mapping[str, Any]) -> Tokenizer:
    """Build the tokenizer that GGUF ``metadata`` describes. Raises TokenizerError naming what is missing or unknown."""
    kind = metadata.get("tokenizer.ggml.model")
    tokens = _strings(metadata, "tokenizer.ggml.tokens")
    if len(set(tokens)) != len(tokens):
        raise TokenizerError("tokenizer.ggml.tokens has duplicates: the GGUF file is damaged")
    types = _token_types(metadata, len(tokens))
    if kind == "gpt2":
        pre = pretokenization(metadata.get("tokenizer.ggml.pre"))
        backend = _byte_level_bpe(tokens, types, _strings(metadata, "tokenizer.ggml.merges"), pre)
        add_bos_default = pre.add_bos
    elif kind == "llama":
        backend = sentencepiece_backend(
            tokens,
            _scores(metadata, len(tokens)),
            unknown=_token_id(metadata, "unknown", len(tokens)) or 0,
            add_prefix_space=bool(metadata.get("tokenizer.ggml.add_space_prefix", True)),
        )
        add_bos_default = True
    else:
        raise TokenizerError(
            f"tokenizer.ggml.model is {kind!r}: only 'gpt2' (byte-level BPE) and 'llama' (SentencePiece) are read; "
            "use the safetensors form of the model"
        )
    _add_special(backend, tokens, types)
    special = _special(metadata, tokens, types, add_bos_default)
    roles = {"bos_token": special.bos, "eos_token": special.eos, "pad_token": special.pad, "unk_token": special.unk}
    names = {role: tokens[i] for role, i in roles.items() if i is not None}
    return Tokenizer(backend, special, chat_templates=_templates(metadata), special_names=names)


def _byte_level_bpe(tokens: Sequence[str], types: Sequence[int], merges: Sequence[str], pre: Any) -> Backend:
    vocab = {token: i for i, token in enumerate(tokens)}
    pairs = [tuple(merge.split(" ", 1)) for merge in merges]
    known = [pair for pair in pairs if len(pair) == 2 and all(p in vocab for p in pair) and "".join(pair) in vocab]
    if len(known) != len(pairs):
        bad = next(m for m, p in zip(merges, pairs, strict=True) if p not in set(known))
        raise TokenizerError(f"tokenizer.ggml.merges has {bad[:80]!r}, whose parts or result are not tokens")
    backend = Backend(models.BPE(vocab=vocab, merges=known, ignore_merges=pre.ignore_merges))
    normalizer = pre.normalizer()
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.pre_tokenizer = pre.build()
    backend.decoder = decoders.ByteLevel()
    return backend


def _add_special(backend: Backend, tokens: Sequence[str], types: Sequence[int]) -> None:
    """Control tokens are special; user-defined ones are cut out of the text too, but stay visible."""
    added = [
        AddedToken(token, special=kind == _CONTROL, normalized=False)
        for token, kind in zip(tokens, types, strict=True)
        if token and kind in (_CONTROL, _USER_DEFINED)
    ]
    backend.add_tokens(added)


def _special(metadata: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int], add_bos: bool) -> SpecialTokens:
    def find(role: str) -> int | None:
        return _token_id(metadata, role, len(tokens))

    ends = {i for i in map(find, ("eos", "eot", "eom")) if i is not None}
    names = {token: i for i, (token, kind) in enumerate(zip(tokens, types, strict=True)) if kind == _CONTROL}
    for name in _TURN_ENDS:
        if name in names and not (name == "<|end|>" and "<|return|>" in names):
            ends.add(names[name])
    return SpecialTokens(
        bos=find("bos"),
        eos=find("eos"),
        pad=find("padding"),
        unk=find("unknown"),
        add_bos=bool(metadata.get("tokenizer.ggml.add_bos_token", add_bos)),
        add_eos=bool(metadata.get("tokenizer.ggml.add_eos_token", False)),
        eos_ids=frozenset(ends),
    )


def _templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    templates: dict[str, str] = {}
    for key, value in metadata.items():
        if isinstance(value, str) and key.startswith("tokenizer.chat_template"):
            templates[key.removeprefix("tokenizer.chat_template").removeprefix(".") or "default"] = value
    return templates


def _strings(metadata: Mapping[str, Any], key: str) -> list[str]:
    value = metadata.get(key)
    if not isinstance(value, (list, tuple)) or not value or not all(isinstance(item, str) for item in value):
        raise TokenizerError(f"the GGUF file has no usable {key} (a list of strings): it holds no tokenizer of its own")
    return list(value)


def _token_types(metadata: Mapping[str, Any], count: int) -> list[int]:
    value = metadata.get("tokenizer.ggml.token_type")
    if value is None:
        return [_NORMAL] * count
    types = [int(item) for item in value]
    if len(types) != count:
        raise TokenizerError(f"tokenizer.ggml.token_type has {len(types)} entries for {count} tokens")
    return types


def _scores(metadata: Mapping[str, Any], count: int) -> list[float]:
    value = metadata.get("tokenizer.ggml.scores")
    scores = [] if value is None else [float(item) for item in value]
    if len(scores) != count:
        raise TokenizerError(f"tokenizer.ggml.scores has {len(scores)} entries for {count} tokens")
    return scores


def _token_id(metadata: Mapping[str, Any], role: str, count: int) -> int | None:
    value = metadata.get(f"tokenizer.ggml.{role}_token_id")
    if value is None:
        return None
    if not 0 <= int(value) < count:
        return None  # llama.cpp writes -1 or 2^32-1 for "none"
    return int(value)
