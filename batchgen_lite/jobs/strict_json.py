"""JSON of one line, parsed strictly: what RFC 8259 forbids or leaves ambiguous is refused, with the place."""

from __future__ import annotations

import json
import re
from typing import Any

from batchgen_lite.errors import RowError

MAX_DEPTH = 128
"""Nesting limit: deeper documents would exhaust the recursion limit when written again."""

_BRACKETS = (b"[", b"{")
# The closing quote is optional: a string without one must not be tried again from each quote inside it.
_STRING_OR_BRACKET = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"?|[\[\]{}]', re.DOTALL)


def parse_object(data: bytes) -> dict[str, Any]:
    """The JSON object in ``data``. RowError("invalid_json") for anything else: bad UTF-8, NaN and Infinity, numbers
    beyond a double, integers of thousands of digits, a name given twice, nesting beyond MAX_DEPTH."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _invalid(f"not UTF-8 at byte {error.start + 1} of the line; save the file as UTF-8") from None
    # The C scanner recurses: counted before, so that a hostile line cannot come near the recursion limit.
    if sum(data.count(bracket) for bracket in _BRACKETS) > MAX_DEPTH and _depth(text) > MAX_DEPTH:
        raise _invalid(f"nested deeper than {MAX_DEPTH} levels; flatten it")
    try:
        value = _DECODER.decode(text)
    except json.JSONDecodeError as error:
        raise _invalid(f"{error.msg} at character {error.pos + 1}{_near(text, error.pos)}") from None
    except RecursionError:
        raise _invalid(f"nested deeper than {MAX_DEPTH} levels; flatten it") from None
    except ValueError as error:  # int() refuses thousands of digits with its own words
        raise _invalid(f"a number is too long to read ({error})") from None
    if not isinstance(value, dict):
        raise RowError("invalid_request", f"the line is a JSON {_kind(value)}: it must be an object, {{...}}")
    return value


def _depth(text: str) -> int:
    """The deepest nesting of brackets outside strings."""
    depth = deepest = 0
    for match in _STRING_OR_BRACKET.finditer(text):
        if match[0] in ("[", "{"):
            depth += 1
            deepest = max(deepest, depth)
        elif match[0] in ("]", "}"):
            depth -= 1
    return deepest


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in result if names.count(name) > 1)
        raise _invalid(f"the name {twice[:60]!r} is given twice in one object; keep one of them")
    return result


def _finite(text: str) -> float:
    value = float(text)
    if value in (float("inf"), float("-inf")):
        raise _invalid(f"the number {text[:40]} is beyond the range of a 64-bit float")
    return value


def _no_constant(name: str) -> float:
    raise _invalid(f"{name} is not JSON; use null or a number")


_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_float=_finite, parse_constant=_no_constant)


def _near(text: str, position: int) -> str:
    piece = text[max(0, position - 12) : position + 12]
    return f", near {piece!r}" if piece else ""


def _kind(value: object) -> str:
    kinds = {list: "array", str: "string", bool: "boolean", int: "number", float: "number"}
    return kinds.get(type(value), "null")


def _invalid(message: str) -> RowError:
    return RowError("invalid_json", message)
