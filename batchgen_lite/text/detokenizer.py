"""Incremental detokenisation, exact by construction.

Tokens are not characters: a character may span tokens, and a decoder may strip the first space or join byte tokens.
Decoding a sliding window of tokens, the usual trick, is wrong at its edges. Instead the decoder of the model's
tokenizer is rebuilt here from its steps, each in streaming form: a step holds back what later tokens may still change,
so that the pieces always add up to ``Tokenizer.decode`` of all the tokens. A decoder with an unknown step is refused
when the model is loaded. Semantics of the steps: huggingface/tokenizers, ``tokenizers/src/decoders``.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from batchgen_lite.errors import TokenizerError
from batchgen_lite.text.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"
_BYTE_TOKEN = re.compile(r"<0x([0-9a-fA-F]{2}|\+[0-9a-fA-F])>")


class _Step(Protocol):
    """One decoder step as a stream: pieces in, the pieces out that no later piece can change."""

    def push(self, piece: str) -> list[str]: ...
    def peek(self, piece: str) -> str:
        """What ``push`` would give now, without changing anything."""
        ...

    def flush(self) -> list[str]: ...
    def pending(self) -> str:
        """What ``flush`` would give, but only whole characters: "" while a character is incomplete."""
        ...


class Detokenizer:
    """The text of one row, token by token. Not reusable for another row."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip = tokenizer.special_ids if skip_special else frozenset()
        self._steps = _build_steps(tokenizer)

    def push(self, token_id: int) -> str:
        """Text that is now certain, "" while a character is incomplete."""
        if token_id in self._skip:
            return ""
        token = self._tokenizer.token(token_id)
        return "" if token is None else "".join(_run(self._steps, [token]))

    def pending(self) -> str:
        """Text held back that ``flush`` would give now, or "" if it would end in an incomplete character."""
        held = ""
        for step in self._steps:
            held = step.pending() + (step.peek(held) if held else "")
        return held

    def flush(self) -> str:
        """The rest, at the end of the row; an incomplete character becomes U+FFFD. Nothing may be pushed after."""
        return "".join(out for i, step in enumerate(self._steps) for out in _run(self._steps[i + 1 :], step.flush()))


def check_decoder(tokenizer: Tokenizer) -> None:
    """Raise TokenizerError now, rather than in the middle of a job, if the tokenizer's decoder is not supported."""
    _build_steps(tokenizer)


def _run(steps: Sequence[_Step], pieces: Iterable[str]) -> list[str]:
    current = list(pieces)
    for step in steps:
        current = [out for piece in current for out in step.push(piece)]
    return current


class _Stateless:
    """A step that holds nothing back."""

    def flush(self) -> list[str]:
        return []

    def pending(self) -> str:
        return ""


class _ByteLevel:
    """Every character of a token stands for a byte (GPT-2's table); a token with other characters, as added tokens
    may be, stands for its own UTF-8."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, piece: str) -> list[str]:
        table = _BYTE_OF
        try:
            data = bytes([table[char] for char in piece])
        except KeyError:
            data = piece.encode("utf-8")
        text = self._decoder.decode(data)
        return [text] if text else []

    def flush(self) -> list[str]:
        text = self._decoder.decode(b"", final=True)
        return [text] if text else []

    def peek(self, piece: str) -> str:
        return ""  # nothing that holds whole characters may stand before this step (see _build_steps)

    def pending(self) -> str:
        return ""  # only ever an incomplete character


def _byte_table() -> dict[str, int]:
    """GPT-2's byte alphabet: printable Latin-1 stands for itself, the other 68 bytes for U+0100 onwards in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


_BYTE_OF = _byte_table()


class _ByteFallback:
    """A run of ``<0xNN>`` tokens is text if the whole run is valid UTF-8, else one U+FFFD for each."""

    def __init__(self) -> None:
        self._run = bytearray()

    def push(self, piece: str) -> list[str]:
        byte = _byte_of(piece)
        if byte is not None:
            self._run.append(byte)
            return []
        return [*self.flush(), piece]

    def flush(self) -> list[str]:
        if not self._run:
            return []
        text = self.pending() or _REPLACEMENT * len(self._run)
        self._run.clear()
        return [text]

    def peek(self, piece: str) -> str:
        return self.pending() + piece if _byte_of(piece) is None else ""

    def pending(self) -> str:
        try:
            return self._run.decode("utf-8")
        except UnicodeDecodeError:
            return ""


def _byte_of(piece: str) -> int | None:
    match = _BYTE_TOKEN.fullmatch(piece)
    return int(match[1], 16) if match else None


class _Replace(_Stateless):
    """A literal string replaced within each token."""

    def __init__(self, pattern: str, content: str) -> None:
        self._pattern, self._content = pattern, content

    def push(self, piece: str) -> list[str]:
        return [self.peek(piece)]

    def peek(self, piece: str) -> str:
        return piece.replace(self._pattern, self._content)


class _Strip(_Stateless):
    """Up to ``start`` leading copies of a character taken off: of each piece, or once of the joined text."""

    def __init__(self, char: str, start: int, *, joined: bool) -> None:
        self._char, self._start, self._joined = char, start, joined
        self._left = start

    def push(self, piece: str) -> list[str]:
        kept = self.peek(piece)
        if self._joined:
            self._left = 0 if kept else self._left - len(piece)
        return [kept] if kept else []

    def peek(self, piece: str) -> str:
        count = self._left if self._joined else self._start
        while count > 0 and piece.startswith(self._char):
            piece, count = piece[1:], count - 1
        return piece


class _Metaspace(_Stateless):
    """``▁`` is a space; in the first token, if the tokenizer puts one before the text, it is nothing."""

    def __init__(self, replacement: str, *, strip_first: bool) -> None:
        self._replacement, self._first = replacement, strip_first

    def push(self, piece: str) -> list[str]:
        text = self.peek(piece)
        self._first = False
        return [text]

    def peek(self, piece: str) -> str:
        return piece.replace(self._replacement, "" if self._first else " ")


def _build_steps(tokenizer: Tokenizer) -> list[_Step]:
    decoder = tokenizer.backend.decoder
    if decoder is None:
        raise TokenizerError("tokenizer.json has no decoder: token ids cannot be turned into text")
    state = json.loads(decoder.__getstate__())
    parts = state["decoders"] if state.get("type") == "Sequence" else [state]
    steps: list[_Step] = []
    joined = False
    for part in parts:
        if part.get("type") == "Fuse":
            joined = True
            continue
        if part.get("type") == "ByteLevel" and any(isinstance(step, _ByteFallback) for step in steps):
            raise _unsupported(part)
        steps.append(_step(part, joined))
        joined = joined or part.get("type") == "ByteLevel"
    return steps


def _step(part: dict[str, Any], joined: bool) -> _Step:
    kind = part.get("type")
    if kind == "ByteLevel" and not joined:
        return _ByteLevel()
    if kind == "ByteFallback" and not joined:
        return _ByteFallback()
    if kind == "Replace" and "String" in part["pattern"] and (not joined or len(part["pattern"]["String"]) == 1):
        return _Replace(part["pattern"]["String"], part["content"])
    if kind == "Strip" and part.get("stop", 0) == 0:
        return _Strip(part["content"], part["start"], joined=joined)
    if kind == "Metaspace" and not joined:
        return _Metaspace(part["replacement"], strip_first=part.get("prepend_scheme", "always") != "never")
    raise _unsupported(part)


def _unsupported(part: dict[str, Any]) -> TokenizerError:
    return TokenizerError(
        f"the tokenizer's decoder step {json.dumps(part)[:200]} is not supported; supported are ByteLevel or "
        "ByteFallback, Fuse, Replace of a string, Strip at the start and Metaspace"
    )
