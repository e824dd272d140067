"""The tokenizer of a model directory: tokenizer.json with what tokenizer_config.json and its neighbours add."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from batchgen_lite.errors import TokenizerError
from batchgen_lite.text.model_files import read_json_file, read_text_file
from batchgen_lite.text.tokenizer import SpecialTokens, Tokenizer, stop_ids

_ROLES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
_LISTS = ("additional_special_tokens", "extra_special_tokens")


def tokenizer_from_directory(root: Path) -> Tokenizer:
    """Load the tokenizer in ``root``. Raises TokenizerError when there is none or it is damaged."""
    config = read_json_file(root, "tokenizer_config.json")
    special_map = read_json_file(root, "special_tokens_map.json")
    # tokenizer_config.json wins: the map is an older duplicate.
    roles = {name: _content(config.get(name, special_map.get(name))) for name in _ROLES}
    backend = _read_backend(root)
    _add_missing_tokens(backend, config)
    _mark_special(backend, [*filter(None, roles.values()), *_listed(config), *_listed(special_map)])
    eos = _id(backend, roles["eos_token"])
    special = SpecialTokens(
        bos=_id(backend, roles["bos_token"]),
        eos=eos,
        pad=_id(backend, roles["pad_token"]),
        unk=_id(backend, roles["unk_token"]),
        # add_bos_token and add_eos_token of the config are not read: beside a tokenizer.json transformers 5 ignores
        # them too, and its post-processor decides.
        eos_ids=frozenset(() if eos is None else (eos,)),
    )
    names = {name: token for name, token in roles.items() if token is not None}
    return Tokenizer(backend, special, chat_templates=_chat_templates(root, config), special_names=names)


def directory_stop_ids(root: Path, tokenizer: Tokenizer) -> frozenset[int]:
    """Union of the stop ids of config.json, generation_config.json and the tokenizer."""
    return stop_ids(tokenizer, read_json_file(root, "config.json"), read_json_file(root, "generation_config.json"))


def _read_backend(root: Path) -> Backend:
    path = root / "tokenizer.json"
    if not path.is_file():
        others = [n for n in ("tokenizer.model", "spiece.model", "tekken.json", "vocab.json") if (root / n).exists()]
        found = f"; it has {', '.join(others)}, which is not read" if others else ""
        raise TokenizerError(
            f"{root} has no tokenizer.json{found}. Save one with transformers: "
            "AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)"
        )
    try:
        return Backend.from_str(read_text_file(path))
    except TokenizerError:
        raise
    except BaseException as error:  # the Rust side raises bare Exception, or a panic, for damaged files
        if isinstance(error, (KeyboardInterrupt, SystemExit)):
            raise
        raise TokenizerError(f"{path} is not a usable tokenizer: {str(error)[:300]}") from error


def _content(value: Any) -> str | None:
    """A special token is a string or a serialised AddedToken."""
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) and value else None


def _listed(config: Mapping[str, Any]) -> Iterator[str]:
    for name in _LISTS:
        values = config.get(name)
        for value in values.values() if isinstance(values, Mapping) else values if isinstance(values, list) else ():
            if (content := _content(value)) is not None:
                yield content


def _add_missing_tokens(backend: Backend, config: Mapping[str, Any]) -> None:
    """added_tokens_decoder lists tokens by id; those that tokenizer.json lacks are added if their id is the next."""
    decoder = config.get("added_tokens_decoder")
    if not isinstance(decoder, Mapping):
        return
    for key in sorted(decoder, key=lambda k: int(k) if str(k).isdigit() else -1):
        entry = decoder[key]
        content = _content(entry)
        if content is None or not str(key).isdigit() or backend.token_to_id(content) is not None:
            continue
        if int(key) != backend.get_vocab_size(with_added_tokens=True):
            raise TokenizerError(
                f"tokenizer_config.json puts {content!r} at id {key}, but tokenizer.json ends at id "
                f"{backend.get_vocab_size(with_added_tokens=True) - 1}: the files do not belong together"
            )
        flags = {name: bool(entry.get(name, False)) for name in ("lstrip", "rstrip", "single_word", "normalized")}
        backend.add_tokens([AddedToken(content, special=bool(entry.get("special", False)), **flags)])


def _mark_special(backend: Backend, tokens: list[str]) -> None:
    """Tokens named as special are special even where tokenizer.json does not flag them. Names without an id are left
    alone: adding them would invent ids that the model does not have."""
    special = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    missing = [t for t in dict.fromkeys(tokens) if t not in special and backend.token_to_id(t) is not None]
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in missing])


def _id(backend: Backend, token: str | None) -> int | None:
    found = None if token is None else backend.token_to_id(token)
    return None if found is None else int(found)


def _chat_templates(root: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """chat_template.jinja and additional_chat_templates/*.jinja win over tokenizer_config.json's string or list."""
    templates: dict[str, str] = {}
    inline = config.get("chat_template")
    if isinstance(inline, str):
        templates["default"] = inline
    elif isinstance(inline, list):
        for entry in inline:
            if isinstance(entry, Mapping) and isinstance(entry.get("name"), str):
                templates[entry["name"]] = str(entry.get("template", ""))
    older = read_json_file(root, "chat_template.json").get("chat_template")
    if isinstance(older, str):
        templates["default"] = older
    for path in sorted((root / "additional_chat_templates").glob("*.jinja")):
        templates[path.stem] = read_text_file(path)
    if (root / "chat_template.jinja").is_file():
        templates["default"] = read_text_file(root / "chat_template.jinja")
    return templates
