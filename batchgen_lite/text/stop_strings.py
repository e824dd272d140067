"""Stop strings in text that arrives piece by piece, wherever the pieces are cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StopMatch:
    """A stop string found: ``text[start:end]`` in the whole text."""

    stop: str
    start: int
    end: int


class StopStrings:
    """Finds the stop string that is complete first, as if the text came character by character: the answer does not
    depend on how the text was cut into tokens. Of several that end at the same character the longest counts."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = sorted(set(stops), key=lambda stop: (-len(stop), stop))
        self._longest = len(self._stops[0]) if self._stops else 0

    def __bool__(self) -> bool:
        return bool(self._stops)

    def find(self, text: str, seen: int) -> StopMatch | None:
        """The first match that ends behind ``text[:seen]``, which was searched before (or is exempt: then a match
        must still end in what follows)."""
        best: StopMatch | None = None
        for stop in self._stops:
            start = text.find(stop, max(0, seen + 1 - len(stop)))
            if start >= 0 and (best is None or start + len(stop) < best.end):
                best = StopMatch(stop, start, start + len(stop))
        return best

    def safe_length(self, text: str) -> int:
        """Characters of ``text`` that no later match can trim: all but the longest tail that begins a stop string."""
        for start in range(max(0, len(text) - self._longest + 1), len(text)):
            tail = text[start:]
            if any(stop.startswith(tail) for stop in self._stops):
                return start
        return len(text)
