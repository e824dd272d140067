"""Reasoning kept apart from the answer, where the model marks it: ``<think>`` blocks and gpt-oss channels.

Marks are recognised as tokens where the vocabulary has them as tokens (they may be special and leave no text), else as
text. gpt-oss ("harmony") writes ``<|channel|>NAME<|message|>...``: "final" is the answer, "analysis" and "commentary"
(tool calls) are reasoning.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from batchgen_lite.text.tokenizer import Tokenizer

_PAIRS = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<seed:think>", "</seed:think>"),
)
_PROMPT_TAIL = 16
"""Tokens of the prompt's end in which a template may have opened a reasoning block ("<think>\\n")."""

_TEXT, _REASONING, _MARKUP = "text", "reasoning", "markup"


@dataclass(frozen=True, slots=True)
class SplitText:
    """The answer, and the reasoning before it, None if there was none."""

    text: str
    reasoning: str | None


class ReasoningSections:
    """Follows one row's tokens and remembers where in its raw text reasoning begins and ends."""

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int] = ()) -> None:
        self._sections: list[tuple[int, str]] = [(0, _TEXT)]
        tail = list(prompt_ids[-_PROMPT_TAIL:])
        self._channels = _Channels.of(tokenizer)
        self._pair = None if self._channels else _token_pair(tokenizer)
        self._opened_by_prompt: str | None = None  # only where marks are text
        self._next = _TEXT
        if self._channels is not None:
            self._next = self._channels.after_prompt(tail)
        elif self._pair is not None:
            begin, end = self._pair
            if begin in tail and end not in tail[_last(tail, begin) :]:
                self._next = _REASONING
        elif tail:
            written = tokenizer.decode(tail, skip_special=False).rstrip()
            self._opened_by_prompt = next((begin for begin, _ in _PAIRS if written.endswith(begin)), None)

    def push(self, token_id: int, start: int) -> None:
        """``token_id`` comes next; its text, if it has any, begins at ``start`` of the raw text."""
        if self._channels is not None:
            kind, self._next = self._channels.push(token_id, self._next)
        elif self._pair is not None and token_id == self._pair[0]:
            kind, self._next = _MARKUP, _REASONING
        elif self._pair is not None and token_id == self._pair[1]:
            if not any(section == _REASONING for _, section in self._sections):
                # Closed but never opened: the template opened it, or the model left it out.
                self._sections = [(0, _REASONING)]
            kind, self._next = _MARKUP, _TEXT
        else:
            kind = self._next
        if kind != self._sections[-1][1]:
            self._sections.append((start, kind))

    def split(self, raw: str) -> SplitText:
        """``raw`` (perhaps cut short by a stop string) divided. Space around the reasoning is taken off."""
        if self._channels is None and self._pair is None:
            return _split_by_text(raw, self._opened_by_prompt)
        parts: dict[str, list[str]] = {_TEXT: [], _REASONING: [], _MARKUP: []}
        ends = [start for start, _ in self._sections[1:]] + [len(raw)]
        for (start, kind), end in zip(self._sections, ends, strict=True):
            parts[kind].append(raw[start:end])
        return _tidy("".join(parts[_TEXT]), "".join(parts[_REASONING]), marked=len(self._sections) > 1)


class _Channels:
    """gpt-oss: headers between ``<|channel|>`` (or ``<|start|>``) and ``<|message|>`` name what follows."""

    def __init__(self, tokenizer: Tokenizer, ids: dict[str, int]) -> None:
        self._tokenizer = tokenizer
        self._ids = ids
        self._header: list[int] | None = None

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> _Channels | None:
        """None if the vocabulary has no channels."""
        names = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>")
        ids = {name: i for name in names if (i := tokenizer.token_id(name)) is not None}
        return cls(tokenizer, ids) if len(ids) == len(names) else None

    def after_prompt(self, tail: Sequence[int]) -> str:
        """The section that the prompt leaves open, from its last ``<|start|>`` on."""
        start = self._ids["<|start|>"]
        kind = _TEXT
        if start in tail:
            for token_id in tail[_last(tail, start) :]:
                _, kind = self.push(token_id, kind)
            if self._ids["<|channel|>"] not in tail[_last(tail, start) :]:
                self._header, kind = None, _TEXT  # "<|start|>assistant": the answer's header comes from the model
        return kind

    def push(self, token_id: int, kind: str) -> tuple[str, str]:
        """The section of ``token_id``, and the section that follows, ``kind`` being the one it was expected in."""
        ids = self._ids
        if token_id in (ids["<|start|>"], ids["<|channel|>"]):
            self._header = []
            return _MARKUP, _MARKUP
        if token_id == ids["<|message|>"]:
            channel = self._tokenizer.decode(self._header or []).strip()
            self._header = None
            return _MARKUP, _REASONING if channel.startswith(("analysis", "commentary")) else _TEXT
        if token_id == ids["<|end|>"]:
            return _MARKUP, _MARKUP
        if self._header is not None:
            self._header.append(token_id)
            return _MARKUP, _MARKUP
        return kind, kind


def _token_pair(tokenizer: Tokenizer) -> tuple[int, int] | None:
    for begin, end in _PAIRS:
        opened, closed = tokenizer.token_id(begin), tokenizer.token_id(end)
        if opened is not None and closed is not None:
            return opened, closed
    return None


def _split_by_text(raw: str, opened_by_prompt: str | None) -> SplitText:
    for begin, end in _PAIRS:
        before, opened, inside = raw.partition(begin)
        if opened_by_prompt == begin or (end in raw and (end in before or not opened)):
            before, opened, inside = "", begin, raw
        if opened:
            reasoning, _, after = inside.partition(end)
            return _tidy(before + after, reasoning, marked=True)
    return SplitText(raw, None)


def _tidy(text: str, reasoning: str, *, marked: bool) -> SplitText:
    if not marked:
        return SplitText(text, reasoning.strip() or None)
    return SplitText(text.lstrip(), reasoning.strip() or None)


def _last(items: Sequence[int], item: int) -> int:
    return max(i for i, value in enumerate(items) if value == item)
