"""JSON from files that may be hostile: no duplicate keys, no NaN, no lone surrogates, nesting errors caught."""

from __future__ import annotations

import json
from typing import Any

from batchgen_lite.errors import CheckpointError


def parse_object(data: bytes, what: str) -> dict[str, Any]:
    """Parse a JSON object; ``what`` names it in errors. Raises CheckpointError for anything that is not one.

    Numbers with a minus sign stay what they are; "-0" becomes the float -0.0, as in most JSON parsers, so that it
    never passes as an integer.
    """
    try:
        value = json.loads(
            data.decode("utf-8"),
            object_pairs_hook=_unique_pairs,
            parse_constant=_no_constant,
            parse_int=_integer,
        )
    except (ValueError, RecursionError) as error:  # JSONDecodeError and UnicodeDecodeError are ValueErrors
        raise CheckpointError(f"{what} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{what} is a JSON {type(value).__name__}, not an object")
    return value


def _unique_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"duplicate key {key[:200]!r}")
        key.encode()  # a lone surrogate raises UnicodeEncodeError, a ValueError
        found[key] = value
    return found


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


def _integer(text: str) -> int | float:
    return -0.0 if text == "-0" else int(text)
