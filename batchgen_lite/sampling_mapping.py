"""Sampling parameters from lines, flags and generation_config.json: names, aliases, misspellings, precedence."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Collection, Mapping
from dataclasses import fields
from typing import Any

from batchgen_lite.errors import ParameterError
from batchgen_lite.sampling_params import SamplingParams

FIELDS = frozenset(f.name for f in fields(SamplingParams))

ALIASES = {"max_new_tokens": "max_tokens", "max_completion_tokens": "max_tokens"}

NAMES = FIELDS | ALIASES.keys() | {"top_logprobs"}
"""Every name that is understood in a line. ``top_logprobs`` goes with ``logprobs: true``, as in OpenAI's chat API."""

GENERATION_CONFIG_FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_new_tokens")
"""What generation_config.json decides: vLLM's list. ``do_sample`` is not read, as in vLLM."""

# Sampling parameters of other tools: silently carrying them through as columns would be a silent wrong answer.
UNSUPPORTED = frozenset(
    {
        "allowed_token_ids",
        "bad_words",
        "bad_words_ids",
        "beam_width",
        "best_of",
        "constraints",
        "do_sample",
        "dry_multiplier",
        "early_stopping",
        "ebnf",
        "epsilon_cutoff",
        "eta_cutoff",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "grammar",
        "guided_choice",
        "guided_decoding",
        "guided_grammar",
        "guided_json",
        "guided_regex",
        "json_schema",
        "length_penalty",
        "logits_processors",
        "max_length",
        "min_length",
        "mirostat",
        "no_repeat_ngram_size",
        "num_beams",
        "num_return_sequences",
        "penalty_alpha",
        "prompt_logprobs",
        "response_format",
        "return_logprob",
        "structured_outputs",
        "suppress_tokens",
        "top_logprobs_num",
        "truncate_prompt_tokens",
        "typical_p",
        "use_beam_search",
        "xtc_probability",
    }
)

# Other tools' spellings that no similarity measure finds.
_HINTS = {
    "eos_token_id": "stop_token_ids",
    "stop_words": "stop",
    "stop_strings": "stop",
    "stop_sequences": "stop",
    "stop_sequence": "stop",
    "stop_token_id": "stop_token_ids",
    "min_new_tokens": "min_tokens",
    "n_predict": "max_tokens",
    "num_predict": "max_tokens",
    "random_seed": "seed",
    "repeat_penalty": "repetition_penalty",
    "sampling_seed": "seed",
    "temp": "temperature",
    "n_probs": "logprobs",
}


def pick_sampling(line: Mapping[str, Any], ignore: Collection[str] = ()) -> dict[str, Any]:
    """The sampling entries of an input line, by canonical name; null means not given. Names in ``ignore`` (fields
    of the line itself) are not looked at, and other columns are left out. A name that looks like a sampling
    parameter but is none (``temprature``) raises ParameterError: as a mere column it would be a silent mistake."""
    picked: dict[str, Any] = {}
    for name, value in line.items():
        if name in ignore:
            continue
        if name in NAMES:
            picked[name] = value
        elif (near := similar_name(name)) is not None or name in UNSUPPORTED:
            raise unknown_name(name, near)
    return canonical(picked)


def from_mapping(values: Mapping[str, Any]) -> SamplingParams:
    """SamplingParams from a mapping of sampling parameters alone. Every unknown name raises ParameterError."""
    return merge_sampling(line=canonical(values))


def canonical(values: Mapping[str, Any]) -> dict[str, Any]:
    """Aliases resolved, nulls dropped, OpenAI's ``logprobs: true`` with ``top_logprobs: n`` turned into a number.
    Unknown names and contradicting aliases raise ParameterError; values are not checked here."""
    result: dict[str, Any] = {}
    for name, value in values.items():
        if name not in NAMES:
            raise unknown_name(name, similar_name(name))
        target = ALIASES.get(name, name)
        if value is None:
            continue
        if target in result and (result[target] != value or type(result[target]) is not type(value)):
            raise ParameterError(
                f"{name} and {target} contradict each other ({value!r} and {result[target]!r}); give one of them",
                param=name,
            )
        result[target] = value
    return _fold_logprobs(result)


def _fold_logprobs(values: dict[str, Any]) -> dict[str, Any]:
    top = values.pop("top_logprobs", None)
    wanted = values.get("logprobs")
    if isinstance(wanted, bool):
        values.pop("logprobs")
        if wanted:
            values["logprobs"] = 0 if top is None else top
        elif top:
            raise ParameterError(
                f"top_logprobs is {top!r} but logprobs is false; set logprobs to true", param="top_logprobs"
            )
    elif top is not None and (wanted is not None or top != 0):
        raise ParameterError(
            f"top_logprobs is {top!r}: it needs logprobs: true (or give the number as logprobs alone)",
            param="top_logprobs",
        )
    return values


def merge_sampling(
    *,
    line: Mapping[str, Any] | None = None,
    flags: Mapping[str, Any] | None = None,
    generation_config: Mapping[str, Any] | None = None,
) -> SamplingParams:
    """One row's parameters: line over flags over generation_config.json over built-in defaults.

    ``line`` and ``flags`` hold sampling names only (see ``pick_sampling``); ``generation_config`` is the whole
    parsed file, of which GENERATION_CONFIG_FIELDS count. Raises ParameterError."""
    merged = generation_defaults(generation_config or {})
    merged.update(canonical(flags or {}))
    merged.update(canonical(line or {}))
    return SamplingParams(**merged)


def generation_defaults(config: Mapping[str, Any]) -> dict[str, Any]:
    """The sampling defaults that a model's generation_config.json sets, checked. Raises ParameterError."""
    values = {name: config[name] for name in GENERATION_CONFIG_FIELDS if config.get(name) is not None}
    try:
        values = canonical(values)
        SamplingParams(**values)
    except ParameterError as error:
        message = f"generation_config.json: {error}; correct the file or override the value with a flag"
        raise ParameterError(message, param=error.param) from error
    return values


@functools.lru_cache(maxsize=4096)  # a file repeats its column names on every line
def similar_name(name: str) -> str | None:
    """The sampling parameter that ``name`` probably means, or None. Known names are not similar to themselves."""
    if name in _HINTS:
        return _HINTS[name]
    squeezed = _squeeze(name)
    by_squeezed = {_squeeze(known): known for known in sorted(NAMES)}
    if squeezed in by_squeezed and by_squeezed[squeezed] != name:
        return by_squeezed[squeezed]  # maxTokens, top-p, Temperature
    if len(name) < 5:  # short columns ("step", "need") resemble short parameters by accident
        return None
    near = difflib.get_close_matches(name.lower(), sorted(NAMES), n=1, cutoff=0.84)
    return near[0] if near else None


def _squeeze(name: str) -> str:
    return name.lower().replace("_", "").replace("-", "")


def unknown_name(name: str, near: str | None) -> ParameterError:
    shown = name if len(name) <= 60 else name[:57] + "..."
    if near is None and name in UNSUPPORTED:
        message = f"the sampling parameter {shown!r} is not supported; remove it from the line"
    elif near is None:
        message = f"unknown sampling parameter {shown!r}; known are {', '.join(sorted(FIELDS))}"
    else:
        message = f"unknown sampling parameter {shown!r}; did you mean {near!r}?"
    return ParameterError(message, param=shown, code="unsupported_parameter")
