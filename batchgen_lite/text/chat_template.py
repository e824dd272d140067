"""Chat messages to prompt text, through the model's own template.

The text holds its special tokens already: tokenise it with ``add_special=False``, or BOS comes twice. A template that
writes no BOS gets none, as with transformers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import Template
from jinja2.exceptions import TemplateError

from batchgen_lite.errors import RowError, TokenizerError
from batchgen_lite.text.model_files import read_text_file
from batchgen_lite.text.template_environment import TemplateEnvironment
from batchgen_lite.text.template_limits import Budget, current
from batchgen_lite.text.tokenizer import Tokenizer

_MAX_SOURCE_BYTES = 4 << 20
_RESERVED = {"messages", "tools", "documents"}


class ChatTemplate:
    """The templates of one model, compiled. Safe to use from several threads.

    Args:
        sources: template text by name. With tools, "tool_use" is preferred, with documents "rag"; else "default".
        variables: names that every rendering sees, such as ``bos_token``.
        now: the time that ``strftime_now`` tells, one for the whole job; keep it in the manifest.

    Raises TokenizerError for a template that is not valid."""

    def __init__(self, sources: Mapping[str, str], variables: Mapping[str, str], now: datetime) -> None:
        environment = TemplateEnvironment(now)
        self._variables = dict(variables)
        self._templates = {name: _compile(environment, name, source) for name, source in sources.items()}
        if not self._templates:
            raise TokenizerError("no chat template was given; pass one with --chat-template FILE")

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt text. ``kwargs`` are further variables (``enable_thinking``) and win over the model's own.

        Raises RowError("template_error") when the template refuses the messages, fails, or exceeds its bounds in work
        or size (see ``template_limits``)."""
        if reserved := _RESERVED & (kwargs or {}).keys():
            raise RowError(
                "invalid_request",
                f"template variables must not be named {', '.join(sorted(reserved))}; these are the line's own fields",
                param="chat_template_kwargs",
            )
        variables: dict[str, Any] = {
            **self._variables,
            "messages": messages,
            "tools": tools,
            "documents": documents,
            "add_generation_prompt": add_generation_prompt,
            **(kwargs or {}),
        }
        template = self._choose(tools, documents)
        token = current.set(Budget(_weight(variables)))
        try:
            return _collect(template, variables)
        except TemplateError as error:
            raise _refused(error.message or type(error).__name__) from error
        except Exception as error:  # a template is foreign code: whatever it raises is this row's error
            raise _refused(f"{type(error).__name__}: {error}") from error
        finally:
            current.reset(token)

    def _choose(self, tools: object, documents: object) -> Template:
        wanted = ["tool_use"] if tools else ["rag"] if documents else []
        for name in [*wanted, "default"]:
            if name in self._templates:
                return self._templates[name]
        raise _refused(f"the model has templates {', '.join(sorted(self._templates))} but none named default")


def load_chat_template(
    tokenizer: Tokenizer, *, file: Path | None = None, now: datetime | None = None
) -> ChatTemplate | None:
    """The chat template in ``file``, else the model's own; None if the model has none (then ``messages`` lines are row
    errors, and --chat-template the way out). Raises TokenizerError for a damaged one."""
    sources = tokenizer.chat_templates if file is None else {"default": read_text_file(file, _MAX_SOURCE_BYTES)}
    return ChatTemplate(sources, tokenizer.special_names, now or datetime.now()) if sources else None


def _compile(environment: TemplateEnvironment, name: str, source: str) -> Template:
    if len(source) > _MAX_SOURCE_BYTES:
        raise TokenizerError(f"the chat template {name!r} has {len(source)} characters; at most {_MAX_SOURCE_BYTES}")
    try:
        return environment.from_string(source)
    except TemplateError as error:
        where = f" at line {line}" if (line := getattr(error, "lineno", None)) else ""
        raise TokenizerError(f"the chat template {name!r} is not valid{where}: {error.message}") from error
    except (RecursionError, MemoryError, SyntaxError, ValueError) as error:
        raise TokenizerError(f"the chat template {name!r} cannot be compiled: {error}") from error


def _collect(template: Template, variables: Mapping[str, Any]) -> str:
    budget = current.get()
    assert budget is not None
    pieces: list[str] = []
    size = 0
    for piece in template.generate(**variables):
        size += len(piece)
        budget.check_size(size)
        pieces.append(piece)
    return "".join(pieces)


def _weight(value: Any) -> int:
    """Characters and items in JSON data, all levels."""
    total, stack = 0, [value]
    while stack:
        item = stack.pop()
        total += 1 + (len(item) if isinstance(item, str) else 0)
        if isinstance(item, Mapping):
            stack.extend(item.values())
        elif isinstance(item, (list, tuple)):
            stack.extend(item)
    return total


def _refused(message: str) -> RowError:
    return RowError("template_error", f"the chat template refused the messages: {message[:500]}", param="messages")
