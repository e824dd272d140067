"""Bounds on what a chat template may do: a template comes with a model and is not to be trusted.

Work is counted, not timed, so that whether a row fails does not depend on the machine: every turn of a loop, macro,
call and filter costs a unit, and operations that copy data cost more, by its size. Everything that makes new data from
old (``+ * ** % ~``, calls, filters, output) is measured before or after it runs, and nothing may grow beyond
``Budget.size`` characters. A generous deadline stands behind the count.

What this cannot stop: a single built-in operation on data already within the bounds (a comparison, ``in``, a sort) runs
to its end, a fraction of a second each unless the data shares parts of itself over dozens of levels.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from typing import Any

from jinja2.exceptions import TemplateRuntimeError

_BASE_WORK = 2_000_000
_BASE_SIZE = 1 << 20
_DEADLINE_SECONDS = 30.0
_MAX_INT_BITS = 4096
_MAX_WIDTH = 10_000
"""Widths, indents and counts handed to filters and string methods."""

_COPY_SHARE = 64
"""Characters copied for one unit of work."""

# Filters that look at their input without going through all that hangs on it.
_SHALLOW = frozenset(
    (
        *("abs", "attr", "count", "d", "default", "dictsort", "first", "float", "groupby", "int", "items", "last"),
        *("length", "list", "map", "max", "min", "reject", "rejectattr", "reverse", "round", "select", "selectattr"),
        *("sort", "sum", "unique"),
    )
)
_WIDTH_FILTERS = frozenset(("batch", "center", "indent", "slice", "tojson", "truncate", "urlize", "wordwrap"))
_WIDTH_METHODS = frozenset(("ljust", "rjust", "center", "zfill", "expandtabs"))
_WIDE_FORMAT = re.compile(r"[%:{.][^a-zA-Z%}]*?\d{5}|\*")


class TemplateLimitError(TemplateRuntimeError):
    """The template exceeded a bound."""


class Budget:
    """What one rendering has left: ``work`` units, and ``size``, the most characters any value may have."""

    def __init__(self, input_weight: int) -> None:
        self.size = _BASE_SIZE + 4 * input_weight
        self.work = _BASE_WORK + input_weight
        self._deadline = time.monotonic() + _DEADLINE_SECONDS

    def spend(self, units: int) -> None:
        """Take ``units`` of work. Raises TemplateLimitError when they are used up."""
        before = self.work
        self.work = before - units
        if self.work < 0:
            raise TemplateLimitError("the template does too much work; does it loop without end?")
        if before >> 12 != self.work >> 12 and time.monotonic() > self._deadline:
            raise TemplateLimitError(f"the template did not finish within {_DEADLINE_SECONDS:g} s")

    def check_size(self, size: int) -> None:
        """Refuse a value of ``size`` characters or items."""
        if size > self.size:
            raise TemplateLimitError(f"the template makes a value of more than {self.size} characters")

    def measure(self, value: Any) -> int:
        """Characters and items in ``value``, all levels, shared parts counted each time. Costs work."""
        total, stack = 0, [value]
        while stack:
            item = stack.pop()
            total += 1
            if isinstance(item, str):
                total += len(item)
            elif isinstance(item, Mapping):
                stack.extend(item.keys())
                stack.extend(item.values())
            elif isinstance(item, (list, tuple, set, frozenset)):
                stack.extend(item)
            self.check_size(total + len(stack))
        self.spend(1 + total // _COPY_SHARE)
        return total

    def glance(self, value: Any) -> int:
        """Characters or items of ``value`` itself. Costs work."""
        size = len(value) if isinstance(value, (str, list, tuple, dict)) else 1
        self.check_size(size)
        self.spend(1 + size // _COPY_SHARE)
        return size


current: ContextVar[Budget | None] = ContextVar("template_budget", default=None)


def active() -> Budget:
    """The budget of the rendering in progress. Raises outside of one: jinja2 must not fold such operations."""
    budget = current.get()
    if budget is None:
        raise TemplateLimitError("not rendering")
    return budget


def check_operator(operator: str, left: Any, right: Any) -> None:
    """Before ``left operator right`` is computed."""
    budget = active()
    if operator == "**":
        if not all(isinstance(x, (int, float)) for x in (left, right)) or abs(right) > 64 or _bits(left) > 64:
            raise TemplateLimitError(f"the template computes {str(left)[:20]} ** {str(right)[:20]}")
        budget.spend(1)
    elif operator == "*":
        _check_product(budget, left, right)
    elif operator == "%" and isinstance(left, str):
        _check_format(budget, left, (right,))
    else:
        budget.check_size(budget.glance(left) + budget.glance(right))


def _check_product(budget: Budget, left: Any, right: Any) -> None:
    for data, times in ((left, right), (right, left)):
        if isinstance(data, (str, list, tuple)) and isinstance(times, int):
            budget.check_size(len(data) * max(times, 0))
            budget.spend(1 + len(data) * max(times, 0) // _COPY_SHARE)
            return
    if _bits(left) + _bits(right) > _MAX_INT_BITS:
        raise TemplateLimitError(f"the template computes with integers of more than {_MAX_INT_BITS} bits")
    budget.spend(1)


def _bits(value: Any) -> int:
    return value.bit_length() if isinstance(value, int) else 0


def _check_format(budget: Budget, template: str, args: Iterable[Any]) -> None:
    """printf-style and str.format widths: no five-digit numbers and no computed widths."""
    if _WIDE_FORMAT.search(template):
        raise TemplateLimitError(f"the template formats with a width that is not allowed: {template[:60]!r}")
    budget.check_size(len(template) + budget.measure(list(args)) * (1 + template.count("%") + template.count("{")))


def check_filter(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Before a filter runs; ``args[0]`` is its input."""
    budget = active()
    if name in _WIDTH_FILTERS:
        _check_widths(f"the filter {name}", [*args[1:], *kwargs.values()])
    if name in _SHALLOW:
        for value in args:
            budget.glance(value)
        return
    size = budget.measure([*args, *kwargs.values()])
    if name == "replace" and len(args) >= 3:
        _check_replace(budget, str(args[0]), args[1], args[2])
    elif name == "join":
        _check_join(budget, args[0], args[1] if len(args) > 1 else kwargs.get("d", ""))
    elif name == "format":
        _check_format(budget, str(args[0]), [*args[1:], *kwargs.values()])
    elif name in ("indent", "tojson"):
        widths = [value for value in [*args[1:], *kwargs.values()] if isinstance(value, int)]
        lines = str(args[0]).count("\n") + 1 if name == "indent" else size
        budget.check_size(lines * max([1, *widths]))


def check_method(name: str, owner: Any, args: tuple[Any, ...]) -> None:
    """Before a method of a string, list or dict is called."""
    budget = active()
    budget.glance(owner)
    if not isinstance(owner, str):
        return
    if name in _WIDTH_METHODS:
        _check_widths(f"the method {name}", args)
        if name == "expandtabs":
            budget.check_size(len(owner) + owner.count("\t") * _MAX_WIDTH)
    elif name == "replace" and len(args) >= 2:
        _check_replace(budget, owner, args[0], args[1])
    elif name == "join" and args:
        _check_join(budget, args[0], owner)
    elif name in ("format", "format_map"):
        _check_format(budget, owner, args)
    elif name == "translate":
        raise TemplateLimitError("the template calls translate, which is not allowed")


def _check_widths(what: str, values: Iterable[Any]) -> None:
    for value in values:
        if isinstance(value, int) and not isinstance(value, bool) and abs(value) > _MAX_WIDTH:
            raise TemplateLimitError(f"the template gives {what} the number {str(value)[:20]}; at most {_MAX_WIDTH}")


def _check_replace(budget: Budget, text: str, old: Any, new: Any) -> None:
    if isinstance(old, str) and isinstance(new, str):
        budget.check_size(len(text) + text.count(old) * max(0, len(new) - len(old)))


def _check_join(budget: Budget, items: Any, separator: Any) -> None:
    count = len(items) if isinstance(items, (str, list, tuple, dict)) else 1
    length = len(separator) if isinstance(separator, str) else 1
    budget.check_size(budget.measure(items) + count * length)
