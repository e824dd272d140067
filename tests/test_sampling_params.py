"""Sampling parameters: ranges, names, aliases and precedence."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchgen_lite.errors import ParameterError, RowError
from batchgen_lite.sampling_mapping import FIELDS, from_mapping, merge_sampling, pick_sampling
from batchgen_lite.sampling_params import SamplingParams


def test_defaults_are_the_documented_ones() -> None:
    params = SamplingParams()
    assert (params.temperature, params.top_p, params.top_k, params.min_p, params.max_tokens) == (1.0, 1.0, 0, 0.0, 512)
    assert (params.min_tokens, params.stop, params.stop_token_ids) == (0, (), ())
    assert (params.seed, params.logprobs) == (None, None)
    assert not params.greedy
    assert not params.has_penalties


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", -0.1),
        ("temperature", True),
        ("temperature", "1"),
        ("temperature", 10**5000),
        ("top_p", 0),
        ("top_p", 1.01),
        ("top_k", -2),
        ("top_k", 1.0),
        ("top_k", True),
        ("min_p", -1e-9),
        ("max_tokens", 0),
        ("max_tokens", 2**31),
        ("max_tokens", 10**5000),
        ("max_tokens", None),
        ("min_tokens", 513),
        ("min_tokens", -1),
        ("stop", 5),
        ("stop", [""]),
        ("stop", ["a", 1]),
        ("stop", ["a"] * 65),
        ("stop", "a" * 1025),
        ("stop_token_ids", [True]),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", 5),
        ("stop_token_ids", [[10**5000]]),
        ("ignore_eos", 1),
        ("skip_special_tokens", "yes"),
        ("seed", 2**63),
        ("seed", 1.5),
        ("presence_penalty", 2.5),
        ("frequency_penalty", -2.5),
        ("repetition_penalty", 0),
        ("logprobs", 21),
        ("logprobs", True),
        ("logit_bias", {"a": 1}),
        ("logit_bias", {"1": 101}),
        ("logit_bias", {"1": math.nan}),
        ("logit_bias", {1: 1, "1": 2}),
        ("logit_bias", {"9" * 5000: 1}),
        ("logit_bias", [1]),
        ("n", 2),
        ("n", 0),
    ],
    ids=lambda value: value if isinstance(value, str) else "value",
)
def test_bad_values_name_field_and_limits(name: str, value: Any) -> None:
    with pytest.raises(ParameterError, match=name) as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name
    assert len(str(caught.value)) < 400
    row_error = caught.value.as_row_error()
    assert isinstance(row_error, RowError)
    assert (row_error.param, row_error.code) == (name, caught.value.code)


def test_values_are_normalised() -> None:
    params = SamplingParams(stop="x", stop_token_ids=[5, 3, 5], top_k=-1, temperature=0, logit_bias={"7": 1, 2: -3})
    assert (params.stop, params.stop_token_ids, params.top_k) == (("x",), (3, 5), 0)
    assert params.logit_bias == {2: -3.0, 7: 1.0}
    assert params.greedy
    assert SamplingParams(stop=["a", "b", "a"]).stop == ("a", "b")
    assert len({params, SamplingParams(), SamplingParams()}) == 2


def test_ids_beyond_the_vocabulary() -> None:
    SamplingParams(stop_token_ids=[9], logit_bias={9: 1}).check_vocabulary(10)
    with pytest.raises(ParameterError, match=r"stop_token_ids is 9.*size 9"):
        SamplingParams(stop_token_ids=[9]).check_vocabulary(9)
    with pytest.raises(ParameterError, match="logit_bias is 9"):
        SamplingParams(logit_bias={9: 1}).check_vocabulary(9)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("temprature", "temperature"),
        ("Temperature", "temperature"),
        ("topP", "top_p"),
        ("top-k", "top_k"),
        ("maxTokens", "max_tokens"),
        ("max_token", "max_tokens"),
        ("temp", "temperature"),
        ("stop_sequences", "stop"),
        ("repeat_penalty", "repetition_penalty"),
        ("frequency_penality", "frequency_penalty"),
        ("logprob", "logprobs"),
    ],
)
def test_misspelt_names_are_refused_with_a_suggestion(name: str, meant: str) -> None:
    for read in (pick_sampling, from_mapping):
        with pytest.raises(ParameterError, match=f"did you mean '{meant}'") as caught:
            read({name: 1})
        assert (caught.value.param, caught.value.code) == (name, "unsupported_parameter")


@pytest.mark.parametrize("name", ["best_of", "guided_json", "num_beams", "prompt_logprobs", "response_format"])
def test_parameters_of_other_tools_are_refused(name: str) -> None:
    with pytest.raises(ParameterError, match="not supported"):
        pick_sampling({name: 1})


@pytest.mark.parametrize(
    "name", ["topic", "step", "text", "label", "source", "tokens", "temporal", "category", "id", "need", "stop_reason"]
)
def test_ordinary_columns_are_left_alone(name: str) -> None:
    assert pick_sampling({name: 1, "seed": 3}) == {"seed": 3}
    with pytest.raises(ParameterError, match="unknown sampling parameter"):
        from_mapping({name: 1})


def test_fields_of_the_line_are_not_looked_at() -> None:
    assert pick_sampling({"stop": "x", "max_token": 1}, ignore={"max_token"}) == {"stop": "x"}


def test_aliases_and_nulls() -> None:
    assert from_mapping({"max_new_tokens": 7}).max_tokens == 7
    assert from_mapping({"max_completion_tokens": 7, "max_tokens": 7}).max_tokens == 7
    assert from_mapping({"max_completion_tokens": 7, "max_tokens": None, "temperature": None}).max_tokens == 7
    with pytest.raises(ParameterError, match="contradict"):
        from_mapping({"max_completion_tokens": 7, "max_tokens": 8})


def test_chat_logprobs() -> None:
    assert from_mapping({"logprobs": True, "top_logprobs": 4}).logprobs == 4
    assert from_mapping({"logprobs": True}).logprobs == 0
    assert from_mapping({"logprobs": False}).logprobs is None
    assert from_mapping({"logprobs": 3}).logprobs == 3
    for bad in ({"top_logprobs": 3}, {"logprobs": False, "top_logprobs": 3}, {"logprobs": 2, "top_logprobs": 3}):
        with pytest.raises(ParameterError, match="top_logprobs"):
            from_mapping(bad)


def test_line_over_flag_over_generation_config_over_built_in() -> None:
    generation = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "max_new_tokens": 99, "do_sample": False}
    flags = {"temperature": 0.5, "top_p": 0.8}
    merged = merge_sampling(line={"temperature": 0.1}, flags=flags, generation_config=generation)
    assert (merged.temperature, merged.top_p, merged.top_k, merged.max_tokens) == (0.1, 0.8, 20, 99)
    assert merge_sampling(line={"max_completion_tokens": 5}, generation_config=generation).max_tokens == 5
    assert merge_sampling() == SamplingParams()


def test_damaged_generation_config_is_named() -> None:
    with pytest.raises(ParameterError, match=r"generation_config\.json: top_p is 7"):
        merge_sampling(generation_config={"top_p": 7})
    assert merge_sampling(generation_config={"top_p": None, "transformers_version": "5"}).top_p == 1.0


JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=3), inner, max_size=3)),
    max_leaves=6,
)


@given(values=st.dictionaries(st.one_of(st.sampled_from(sorted(FIELDS)), st.text(max_size=12)), JSON, max_size=5))
def test_any_json_is_either_accepted_or_a_parameter_error(values: dict[str, Any]) -> None:
    try:
        picked = pick_sampling(values)
        params = merge_sampling(line=picked)
    except ParameterError:
        return
    for name, value in picked.items():
        if isinstance(value, float):
            assert getattr(params, name) == value
