"""The jinja2 environment that chat templates run in: what transformers offers them, sandboxed, within a budget."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Any

from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from batchgen_lite.text.template_limits import (
    TemplateLimitError,
    active,
    check_filter,
    check_method,
    check_operator,
    current,
)


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """Compiles templates whose loops, macros, calls, filters and operators are counted against the active budget.

    ``now`` is the one time that ``strftime_now`` tells during a job, so that all rows, and a resumed run, agree."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self, now: datetime) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[GenerationExtension, LoopControlExtension],
            finalize=_check_output,
        )
        self.filters["tojson"] = _tojson
        for name in ("pprint", "random", "urlize", "xmlattr"):
            del self.filters[name]  # no use in a chat; random would make rows irreproducible
        for name, function in list(self.filters.items()):
            self.filters[name] = _guarded_filter(name, function)
        del self.globals["lipsum"]
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _clock(now)
        self.globals["dict"] = _make_dict
        self.globals["namespace"] = _SafeNamespace

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        result = _Counting(self).visit(tree)
        assert isinstance(result, nodes.Template)
        return result

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        check_operator(operator, left, right)
        return super().call_binop(context, operator, left, right)

    # The unusual names keep clear of keyword arguments that a template passes, as in jinja2's own signature.
    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, (str, list, dict, tuple)):
            check_method(__obj.__name__, owner, args)
        result = super().call(__context, __obj, *args, **kwargs)
        active().glance(result)
        return result

    @property
    def tick(self) -> None:
        """Counts one turn of a loop or macro. A property because compiled templates read it as ``environment.tick``:
        a call would pass through the sandbox and take ten times as long."""
        active().spend(4)

    def spend(self, units: int) -> None:
        """Counts one turn of a loop or macro that writes much text; called from compiled templates."""
        active().spend(units)

    def concat_values(self, *values: Any) -> str:
        """The ``~`` operator; called from compiled templates."""
        budget = active()
        budget.check_size(sum(budget.measure(value) for value in values))
        return "".join(map(str, values))


class GenerationExtension(Extension):
    """``{% generation %}...{% endgeneration %}`` marks the assistant's part for training: its body is rendered."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own way to declare it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


class _Counting(NodeTransformer):
    """Puts a tick at the head of every loop, macro and call block, and sends ``~`` through ``concat_values``.

    A turn costs more where the template's own text inside is long: captured by ``set`` or a macro it is not output yet,
    and would else be counted too late."""

    def __init__(self, environment: TemplateEnvironment) -> None:
        self._environment = environment

    def _ticked(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        literal = sum(len(part.data) for child in node.body for part in _template_data(child))
        count: nodes.Expr = nodes.EnvironmentAttribute("tick")
        if literal >= 256:
            units = nodes.Const(4 + literal // 32)
            count = nodes.Call(nodes.EnvironmentAttribute("spend"), [units], [], None, None)
        tick = nodes.ExprStmt(count).set_lineno(node.lineno).set_environment(self._environment)
        node.body.insert(0, tick)
        return node  # type: ignore[no-any-return]

    visit_For = visit_Macro = visit_CallBlock = _ticked

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        call = nodes.Call(nodes.EnvironmentAttribute("concat_values"), node.nodes, [], None, None)
        return call.set_lineno(node.lineno).set_environment(self._environment)


def _template_data(node: nodes.Node) -> Iterator[nodes.TemplateData]:
    if isinstance(node, nodes.TemplateData):
        yield node
    yield from node.find_all(nodes.TemplateData)


class _SafeNamespace(Namespace):
    """jinja2's namespace without underscore names, which could reach Python's internals."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *positional = args
        attributes = dict(*positional, **kwargs)
        for name in attributes:
            _check_name(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"the template sets the namespace attribute {name!r}; names must not begin with _")


def _make_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)


def _raise_exception(message: object) -> None:
    raise TemplateError(str(message))


def _clock(now: datetime) -> Callable[[str], str]:
    def strftime_now(format: str) -> str:
        if len(format) > 100 or any(len(run) > 2 for run in _digit_runs(format)):
            raise TemplateLimitError(f"strftime_now got the format {format[:40]!r}; widths are not allowed")
        return now.strftime(format)

    return strftime_now


def _digit_runs(text: str) -> list[str]:
    return "".join(char if char.isdigit() else " " for char in text).split()


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As transformers has it: jinja2's own would escape for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _guarded_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    # jinja2 passes a context, eval context or environment first to filters that ask for it.
    skip = 1 if hasattr(function, "jinja_pass_arg") else 0

    @functools.wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        check_filter(name, args[skip:], kwargs)
        result = function(*args, **kwargs)
        active().glance(result)
        return result

    return guarded


def _check_output(value: Any) -> Any:
    budget = current.get()
    if budget is None:
        return value  # a constant, while the template is compiled
    if isinstance(value, str):
        budget.glance(value)
    else:
        budget.measure(value)  # printing a list prints all that hangs on it
    return value
