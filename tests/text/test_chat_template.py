"""Chat templates: the same text as transformers, and hostile templates stopped."""

from __future__ import annotations

import time
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from batchgen_lite.errors import RowError, TokenizerError
from batchgen_lite.text.chat_template import ChatTemplate, load_chat_template
from batchgen_lite.text.tokenizer import load_tokenizer

NOW = datetime(2025, 3, 4, 5, 6, 7)
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}

CHATML = """{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>'
 + '\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
# Shapes that real templates use: system extraction, alternation checks, macros, namespaces, loop controls, tojson.
LLAMA2 = """{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}
{% set system_message = messages[0]['content'] %}{% else %}{% set loop_messages = messages %}
{% set system_message = false %}{% endif %}{% for message in loop_messages %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}
{% if loop.index0 == 0 and system_message != false %}
{% set content = '<<SYS>>\\n' + system_message + '\\n<</SYS>>\\n\\n' + message['content'] %}
{% else %}{% set content = message['content'] %}{% endif %}
{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}
{% elif message['role'] == 'assistant' %}{{ ' '  + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"""
QWEN3 = """{%- macro show(content, quote=false) %}{{ '"' if quote }}{{ content }}{{ '"' if quote }}{%- endmacro %}
{%- set ns = namespace(multi_step_tool=true, last=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last = index %}
        {%- break %}
    {%- endif %}
{%- endfor %}
{%- if tools %}{{- '<tools>' }}{%- for tool in tools %}{{- "\n" }}{{- tool | tojson }}{%- endfor %}{{- '</tools>' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.content is not string %}{% continue %}{%- endif %}
    {%- set content = message.content %}
    {%- if '</think>' in content %}{%- set content = content.split('</think>')[-1].lstrip('\n') %}{%- endif %}
    {{- '<|im_start|>' ~ message.role ~ '\n' ~ show(content, quote=loop.last) ~ '<|im_end|>\n' }}
{%- endfor %}
{% generation %}{% for i in range(2) %}x{{ i }}{% endfor %}{% endgeneration %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}
  {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}
{%- endif %}"""
FILTERS = """{{ messages | map(attribute='role') | join(',') }}
{{ messages | selectattr('role', 'equalto', 'user') | list | length }}
{{ {'a': [1, 2.5, none, true], 'ü': '<b>'} | tojson(indent=2) }}
{{ messages[0].content | trim | upper | replace('E', '3') }} {{ '%s-%d' % ('x', 3) }} {{ 'a' * 3 }} {{ 2 ** 10 }}
{{ [1] + [2] }} {{ dict(a=1).items() | list }} {{ 'x'.join(['a','b']) }}
{{- "{}!".format(bos_token) }} {{ messages[-1]['content'][:3] | title }} {{ messages | string | length }}{{ 7 % 4 }}
{%- for k, v in messages[0] | dictsort %}{{ k }}={{ v | indent(2) }};{% endfor %}{{ "abc" | center(9) }}"""

MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "  Hé says <b>'hi'</b> & \"yo\"\nthere "},
    {"role": "assistant", "content": "<think>x</think>\n\nok"},
    {"role": "user", "content": "日本語 🙂"},
]


def ours(source: str, messages: Any = MESSAGES, **options: Any) -> str:
    return ChatTemplate({"default": source}, SPECIAL, NOW).render(messages, **options)


@pytest.mark.parametrize("source", [CHATML, LLAMA2, QWEN3, FILTERS], ids=["chatml", "llama2", "qwen3", "filters"])
@pytest.mark.parametrize("generation", [True, False])
@pytest.mark.parametrize("tools", [None, [{"name": "f", "parameters": {"x": "é"}}]], ids=["plain", "tools"])
def test_same_text_as_transformers(source: str, generation: bool, tools: Any) -> None:
    rendered, _ = render_jinja_template(
        conversations=[MESSAGES],
        tools=tools,
        chat_template=source,
        add_generation_prompt=generation,
        enable_thinking=False,
        **SPECIAL,
    )
    mine = ours(source, tools=tools, add_generation_prompt=generation, kwargs={"enable_thinking": False})
    assert mine == rendered[0]
    assert len(mine) > 50


def test_variables_of_the_line() -> None:
    source = "{{ add_generation_prompt }} {{ bos_token }} {{ thinking }}"
    assert ours(source, kwargs={"thinking": 1, "add_generation_prompt": 0, "bos_token": "B"}) == "0 B 1"
    with pytest.raises(RowError, match="messages") as caught:
        ours(source, kwargs={"messages": []})
    assert caught.value.param == "chat_template_kwargs"


def test_time_is_fixed_for_the_job() -> None:
    assert ours("{{ strftime_now('%Y-%m-%d %H:%M') }}") == "2025-03-04 05:06"


def test_refusal_is_a_row_error_with_the_templates_words() -> None:
    with pytest.raises(RowError, match="roles must alternate") as caught:
        ours(LLAMA2, [{"role": "assistant", "content": "x"}])
    assert caught.value.code == "template_error"
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.nothing.at.all }}",
        "{{ messages[0] + 1 }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{% set ns = namespace() %}{% set ns._x = 1 %}{{ namespace(__class__=1) }}",
        "{{ lipsum(n=100) }}",
        "{{ cycler.__init__.__globals__ }}",
        "{% include '/etc/passwd' %}",
    ],
)
def test_failures_and_escapes_are_row_errors(source: str) -> None:
    with pytest.raises(RowError):
        ours(source)


def doubling(step: str, start: str = "'a'", after: str = "") -> str:
    """A template that doubles ``n.x`` sixty times by ``step``."""
    head = "{% macro d(x) %}{{ x }}{{ x }}{% endmacro %}{% set n = namespace(x=" + start + ") %}"
    return head + "{% for i in range(60) %}" + step + "{% endfor %}" + after


BOMBS = {
    "endless loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "long output": "{% for a in range(99999) %}" + "x" * 1000 + "{% endfor %}",
    "long capture": "{% set t %}{% for a in range(99999) %}" + "x" * 9000 + "{% endfor %}{% endset %}",
    "multiplied string": "{{ 'a' * 1000000000 }}",
    "multiplied list": "{{ [0] * 1000000000 }}",
    "power": "{{ 9 ** 999999999 }}",
    "squares": doubling("{% set n.x = n.x * n.x %}", "9"),
    "doubling by +": doubling("{% set n.x = n.x + n.x %}"),
    "doubling by ~": doubling("{% set n.x = n.x ~ n.x %}"),
    "doubling by %": doubling("{% set n.x = '%s%s' % (n.x, n.x) %}"),
    "doubling by format": doubling("{% set n.x = '{0}{0}'.format(n.x) %}"),
    "doubling by join": doubling("{% set n.x = [n.x, n.x] | join %}"),
    "doubling by replace": doubling("{% set n.x = n.x.replace('a', 'aa') %}"),
    "doubling by macro": doubling("{% set n.x = d(n.x) %}"),
    "doubling by block": doubling("{% set t %}{{ n.x }}{{ n.x }}{% endset %}{% set n.x = t %}"),
    "shared lists": doubling("{% set n.x = [n.x, n.x] %}", "[1]", "{{ n.x }}"),
    "shared lists to json": doubling("{% set n.x = [n.x, n.x] %}", "[1]", "{{ n.x | tojson }}"),
    "wide filter": "{{ 'a' | center(1000000000) }}",
    "wide method": "{{ 'a'.ljust(1000000000) }}",
    "wide format": "{{ '{:1000000000}'.format(1) }}",
    "wide printf": "{{ '%1000000000d' % 1 }}",
    "computed width": "{{ '%*d' % (1000000000, 1) }}",
    "wide json": "{{ [1] | tojson(indent=1000000000) }}",
    "wide time": "{{ strftime_now('%1000000000Y') }}",
    "big batch": "{{ [1] | batch(1000000000, 'x') | list }}",
    "recursion": "{% macro f(x) %}{{ f(x) }}{{ f(x) }}{% endmacro %}{{ f(1) }}",
    "tree of calls": "{% macro f(x) %}{% if x %}{{ f(x - 1) }}{{ f(x - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
}


@pytest.mark.parametrize("source", BOMBS.values(), ids=list(BOMBS))
def test_bombs_are_row_errors_soon(source: str) -> None:
    started = time.process_time()
    with pytest.raises(RowError) as caught:
        ours(source)
    assert caught.value.code == "template_error"
    assert time.process_time() - started < 8


def test_long_input_is_no_bomb() -> None:
    messages = [{"role": "user", "content": "word " * 1_000_000}] * 3
    assert len(ours(CHATML, messages)) > 15_000_000


def test_invalid_template_is_refused_when_loaded() -> None:
    with pytest.raises(TokenizerError, match="line 2"):
        ChatTemplate({"default": "ok\n{% for x in %}"}, {}, NOW)


def test_templates_by_name() -> None:
    template = ChatTemplate({"default": "plain", "tool_use": "tools", "rag": "rag"}, {}, NOW)
    assert template.render([]) == "plain"
    assert template.render([], tools=[{}]) == "tools"
    assert template.render([], documents=[{}]) == "rag"
    with pytest.raises(RowError, match="none named default"):
        ChatTemplate({"tool_use": "tools"}, {}, NOW).render([])


def test_template_file_wins_over_the_models_own(byte_level_directory: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(byte_level_directory)
    own = load_chat_template(tokenizer, now=NOW)
    assert own is not None
    assert own.render([{"role": "user", "content": "hi"}]) == "<bos>user:hi\n"
    (tmp_path / "mine.jinja").write_text("{{ bos_token }}mine")
    other = load_chat_template(tokenizer, file=tmp_path / "mine.jinja", now=NOW)
    assert other is not None
    assert other.render([]) == "<bos>mine"
    tokenizer.chat_templates.clear()
    assert load_chat_template(tokenizer) is None
