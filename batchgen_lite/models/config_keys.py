"""Typed reading of config.json, whose keys have several spellings, with errors that name the key."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from batchgen_lite.errors import CheckpointError, UnsupportedError


class Config:
    """A read-only view of a parsed config.json.

    Every getter takes the alternative spellings of one key, the first present one wins; JSON ``null`` counts as
    absent unless the method says otherwise. A value of the wrong type or range is a CheckpointError.
    """

    def __init__(self, raw: Mapping[str, Any], source: str = "config.json") -> None:
        self.raw = raw
        self.source = source

    def has(self, *names: str) -> bool:
        """Whether any spelling is present, even with the value null."""
        return any(name in self.raw for name in names)

    def value(self, *names: str) -> Any:
        """The first spelling that is present and not null, else None."""
        for name in names:
            if self.raw.get(name) is not None:
                return self.raw[name]
        return None

    def _wrong(self, names: Sequence[str], value: Any, wanted: str) -> CheckpointError:
        return CheckpointError(
            f"{self.source}: {names[0]!r} is {value!r}, but must be {wanted}. The file is damaged or not a model's."
        )

    def _missing(self, names: Sequence[str]) -> CheckpointError:
        also = f" (also looked for {', '.join(names[1:])})" if len(names) > 1 else ""
        return CheckpointError(f"{self.source} has no {names[0]!r}{also}, which this architecture needs.")

    def integer(self, *names: str, default: int | None = None, minimum: int = 1) -> int:
        """An int >= ``minimum``; required where there is no default."""
        value = self.value(*names)
        if value is None:
            if default is None:
                raise self._missing(names)
            return default
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise self._wrong(names, value, f"an integer >= {minimum}")
        return value

    def optional_integer(self, *names: str, minimum: int = 1) -> int | None:
        return None if self.value(*names) is None else self.integer(*names, minimum=minimum)

    def number(self, *names: str, default: float | None = None, positive: bool = True) -> float:
        """A finite number, > 0 unless ``positive`` is False; required where there is no default."""
        value = self.value(*names)
        if value is None:
            if default is None:
                raise self._missing(names)
            return default
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self._wrong(names, value, "a number")
        if value != value or abs(value) == float("inf") or (positive and value <= 0):
            raise self._wrong(names, value, "a finite number above 0" if positive else "a finite number")
        return float(value)

    def flag(self, *names: str, default: bool | None = None) -> bool:
        value = self.value(*names)
        if value is None:
            if default is None:
                raise self._missing(names)
            return default
        if not isinstance(value, bool):
            raise self._wrong(names, value, "true or false")
        return value

    def text(self, *names: str, default: str | None = None) -> str:
        value = self.value(*names)
        if value is None:
            if default is None:
                raise self._missing(names)
            return default
        if not isinstance(value, str):
            raise self._wrong(names, value, "a string")
        return value

    def mapping(self, *names: str) -> Mapping[str, Any] | None:
        value = self.value(*names)
        if value is not None and not isinstance(value, Mapping):
            raise self._wrong(names, value, "an object")
        return value

    def integers(self, *names: str) -> tuple[int, ...]:
        """A list of ints, one int standing for a list of one, () where absent."""
        value = self.value(*names)
        values = [] if value is None else value if isinstance(value, list) else [value]
        if any(isinstance(item, bool) or not isinstance(item, int) for item in values):
            raise self._wrong(names, value, "an integer or a list of integers")
        return tuple(values)

    def strings(self, *names: str, length: int) -> tuple[str, ...] | None:
        """A list of exactly ``length`` strings, None where absent."""
        value = self.value(*names)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) != length or not all(isinstance(item, str) for item in value):
            raise self._wrong(names, value, f"a list of {length} strings, one per layer")
        return tuple(value)

    def refuse_unless(self, name: str, *allowed: Any) -> None:
        """UnsupportedError where an option is present (null included) with a value not implemented."""
        if name in self.raw and self.raw[name] not in allowed:
            wanted = " or ".join(repr(item) for item in allowed)
            raise UnsupportedError(
                f"{self.source}: {name} = {self.raw[name]!r} is not implemented for this architecture; only {wanted}."
            )
