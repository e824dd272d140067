"""Text to token ids and back, for model directories (tokenizer.json) and GGUF files alike."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer as Backend

from batchgen_lite.errors import RowError, TokenizerError

if TYPE_CHECKING:
    from batchgen_lite.offload.checkpoint.tensors import Checkpoint


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """What a model's files say about its special tokens.

    ``add_bos``/``add_eos``: whether plain text gets them; None leaves it to tokenizer.json's post-processor.
    ``eos_ids``: every id that ends a turn according to the tokenizer's own files, ``eos`` included."""

    bos: int | None = None
    eos: int | None = None
    pad: int | None = None
    unk: int | None = None
    add_bos: bool | None = None
    add_eos: bool | None = None
    eos_ids: frozenset[int] = frozenset()


class Tokenizer:
    """A loaded tokenizer. Thread-safe for encoding and decoding; holds no torch.

    ``chat_templates``: the model's templates by name; the usual one is "default"; empty if it has none.
    ``special_names``: special tokens by role ("bos_token": "<s>"), as templates see them."""

    def __init__(
        self,
        backend: Backend,
        special: SpecialTokens,
        *,
        chat_templates: Mapping[str, str] | None = None,
        special_names: Mapping[str, str] | None = None,
    ) -> None:
        # A tokenizer.json may carry the truncation and padding of its training: never ours.
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self.special = special
        self.chat_templates = dict(chat_templates or {})
        self.special_names = dict(special_names or {})
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self.added_ids = frozenset(added)
        self.vocab_size = max(backend.get_vocab_size(with_added_tokens=True), max(added, default=-1) + 1)
        """One more than the largest id; the model's logits may be padded beyond it."""

    @property
    def bos_id(self) -> int | None:
        return self.special.bos

    @property
    def eos_id(self) -> int | None:
        return self.special.eos

    def encode(self, text: str, add_special: bool) -> list[int]:
        """Token ids of ``text``. ``add_special`` adds BOS/EOS as the model's files say; pass False for text that
        comes from a chat template, which writes its own. Raises RowError for text that is not valid Unicode."""
        return self.encode_batch([text], add_special)[0]

    def encode_batch(self, texts: Sequence[str], add_special: bool) -> list[list[int]]:
        """As ``encode`` for many texts at once, on all cores."""
        for text in texts:
            _check_unicode(text)
        ours = self.special.add_bos is not None or self.special.add_eos is not None
        encoded = self.backend.encode_batch_fast(list(texts), add_special_tokens=add_special and not ours)
        ids = [encoding.ids for encoding in encoded]
        if add_special and ours:
            before = [self.special.bos] if self.special.add_bos and self.special.bos is not None else []
            after = [self.special.eos] if self.special.add_eos and self.special.eos is not None else []
            ids = [[*before, *row, *after] for row in ids]
        return ids

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """Text of ``ids``; ids that the vocabulary lacks give no text; invalid UTF-8 becomes U+FFFD."""
        return str(self.backend.decode(list(ids), skip_special_tokens=skip_special))

    def token(self, token_id: int) -> str | None:
        """The token as the vocabulary spells it (byte-level or with ``▁``), or None."""
        token = self.backend.id_to_token(token_id) if token_id >= 0 else None
        return None if token is None else str(token)

    def token_id(self, token: str) -> int | None:
        """The id of a token spelt as the vocabulary does, or None."""
        found = self.backend.token_to_id(token)
        return None if found is None else int(found)


def load_tokenizer(model: str | Path | Checkpoint) -> Tokenizer:
    """The tokenizer of a model directory, a GGUF file or an opened checkpoint. Raises TokenizerError, also for a
    decoder that could not be followed token by token."""
    from batchgen_lite.text.detokenizer import check_decoder  # builds on Tokenizer above

    tokenizer = _load(model)
    check_decoder(tokenizer)
    return tokenizer


def _load(model: str | Path | Checkpoint) -> Tokenizer:
    # Imported here: both build on Tokenizer above, and a directory does not need what reads GGUF files.
    from batchgen_lite.text.tokenizer_directory import tokenizer_from_directory
    from batchgen_lite.text.tokenizer_gguf import read_tokenizer_metadata, tokenizer_from_metadata

    if not isinstance(model, (str, Path)):
        if model.format == "gguf":
            return tokenizer_from_metadata(model.metadata)
        return tokenizer_from_directory(model.root)
    path = Path(model)
    if path.is_dir():
        return tokenizer_from_directory(path)
    if path.is_file() and path.suffix.lower() == ".gguf":
        return tokenizer_from_metadata(read_tokenizer_metadata(path))
    raise TokenizerError(f"{path} is neither a model directory nor a .gguf file; pass one of them as --model")


def stop_ids(tokenizer: Tokenizer | None, *configs: Mapping[str, Any]) -> frozenset[int]:
    """Every id that ends a row: the union of the tokenizer's and of ``eos_token_id`` (an int or a list) in each of
    ``configs`` (config.json, its text_config if it has one, generation_config.json). Raises TokenizerError."""
    found: set[int] = set(tokenizer.special.eos_ids) if tokenizer is not None else set()
    for config in configs:
        found.update(_ids(config.get("eos_token_id")))
        text_config = config.get("text_config")
        if isinstance(text_config, Mapping):
            found.update(_ids(text_config.get("eos_token_id")))
    return frozenset(found)


def _ids(value: Any) -> Iterable[int]:
    values = value if isinstance(value, (list, tuple)) else [value]
    for item in values:
        if item is None:
            continue
        if isinstance(item, bool) or not isinstance(item, int) or item < 0:
            raise TokenizerError(f"eos_token_id is {value!r}: it must be a token id or a list of them")
        yield item


def _check_unicode(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        message = f"the text has a lone surrogate (U+{ord(text[error.start]):04X}) at character {error.start}"
        raise RowError("invalid_request", f"{message}: it is not valid Unicode; correct the escape") from error
