"""Context limit, randomness, and the checks that need the model."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchgen_lite.errors import RowError
from batchgen_lite.jobs.byte_text import ByteText
from batchgen_lite.jobs.envelope import open_envelope
from batchgen_lite.jobs.prepare import PreparedRow, Preparer, Settings, fit_context, randomness
from batchgen_lite.sampling_params import SamplingParams


def prepared(row: int = 0, settings: Settings | None = None, context: int = 100, **fields: Any) -> PreparedRow:
    envelope = open_envelope(json.dumps(fields).encode())
    return Preparer(settings or Settings(base_seed=1), ByteText(max_positions=context)).prepare(envelope, row)


def test_precedence_is_line_over_flag_over_model_over_default() -> None:
    text = ByteText()
    text.generation_config = {"temperature": 0.25, "top_p": 0.5, "top_k": 7}
    settings = Settings(1, flags={"temperature": 0.5, "top_p": 0.75})
    params = Preparer(settings, text).prepare(open_envelope(b'{"prompt": "a", "temperature": 0.75}'), 0).params
    assert (params.temperature, params.top_p, params.top_k, params.max_tokens) == (0.75, 0.75, 7, 512)


@pytest.mark.parametrize(
    ("fields", "code", "words"),
    [
        ({"prompt": "a", "temperature": "hot"}, "invalid_request", "temperature is 'hot'"),
        ({"prompt": "a", "max_tokens": True}, "invalid_request", "max_tokens is True"),
        ({"prompt": "a", "top_k": 10**30}, "invalid_request", "top_k is"),
        ({"prompt": "a", "n": 2}, "unsupported_parameter", "only n=1"),
        ({"prompt": ""}, "invalid_request", "the prompt is empty"),
        ({"token_ids": [5, 257]}, "invalid_request", "token_ids holds 257: the model's ids end at 256"),
        ({"prompt": "a", "stop_token_ids": [999]}, "invalid_request", "vocabulary"),
        ({"prompt": "a", "logit_bias": {"999": 1}}, "invalid_request", "vocabulary"),
        ({"messages": [{"role": "oracle", "content": "x"}]}, "template_error", "no role 'oracle'"),
        ({"prompt": "a" * 100}, "context_length_exceeded", "100 tokens, the model's context 100"),
        ({"prompt": "a" * 95, "min_tokens": 6}, "context_length_exceeded", "min_tokens is 6"),
    ],
)
def test_rows_that_cannot_be_answered(fields: dict[str, Any], code: str, words: str) -> None:
    with pytest.raises(RowError, match=words) as caught:
        prepared(**fields)
    assert caught.value.code == code


@given(st.integers(1, 300), st.integers(1, 300), st.sampled_from(["truncate-left", "truncate-right"]))
def test_truncated_prompts_fit_and_leave_room(length: int, max_tokens: int, on_long: str) -> None:
    prompt = list(range(length))
    ids, params = fit_context(prompt, SamplingParams(max_tokens=max_tokens), 100, on_long)
    assert len(ids) + params.max_tokens <= 100
    assert params.max_tokens == min(max_tokens, 100 - len(ids)) >= 1
    if length < 100:
        assert ids == prompt
    else:
        assert ids == (prompt[-len(ids) :] if on_long == "truncate-left" else prompt[: len(ids)])
        assert len(ids) == 100 - min(max_tokens, 50)


def test_a_prompt_may_fill_the_context_but_for_one_token() -> None:
    row = prepared(prompt="a" * 99, max_tokens=5)
    assert (len(row.prompt_ids), row.params.max_tokens) == (99, 1)


def test_a_seeded_row_depends_on_its_seed_alone() -> None:
    assert randomness(5, "a", 17, 1) == randomness(5, None, 3, 2) == (5, 0)
    assert randomness(-1, None, 0, 0) == (2**64 - 1, 0)


def test_other_rows_are_told_apart_by_id_or_place() -> None:
    assert randomness(None, "a", 17, 1) == randomness(None, "a", 3, 1)
    assert randomness(None, None, 3, 1) == (1, 3)
    streams = {randomness(None, ident, row, base) for ident in ("1", 1, "b", None) for row in (0, 1) for base in (1, 2)}
    assert len(streams) == 2 * 3 + 2 * 2
