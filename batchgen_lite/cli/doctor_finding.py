"""What a check of ``doctor`` says: a fact, and if something is wrong, what to do about it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Finding:
    """One line. ``advice`` is empty unless it is a problem; ``data`` holds the figures for --json (bytes, bytes/s,
    FLOP/s)."""

    section: str
    name: str
    value: str
    advice: str = ""
    data: dict[str, Any] = field(default_factory=dict)

    @property
    def is_problem(self) -> bool:
        return bool(self.advice)

    def fields(self) -> dict[str, Any]:
        """As --json shows it."""
        shown = {"section": self.section, "name": self.name, "value": self.value, "problem": self.is_problem}
        return {**shown, "advice": self.advice or None, "data": self.data}


Check = Callable[[], Iterable[Finding]]


def run_checks(section: str, checks: Iterable[Check]) -> Iterator[Finding]:
    """All findings of a section. A check that breaks becomes a finding: a machine odd enough to break one is exactly
    where the others are wanted."""
    for check in checks:
        try:
            yield from check()
        except Exception as error:
            name = getattr(check, "__name__", "check").strip("_").replace("_", " ")
            yield Finding(
                section,
                name,
                f"could not be found out: {type(error).__name__}: {error}",
                "the other findings are valid; please report this one",
            )
