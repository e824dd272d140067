"""How one row is sampled: names and defaults as vLLM and OpenAI use them. Torch-free."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from batchgen_lite.errors import ParameterError

GREEDY_TEMPERATURE = 1e-5
"""Below this temperature a row is decoded greedily (vLLM's limit)."""

_INT32_MAX = 2**31 - 1
_MAX_LOGPROBS = 20  # as OpenAI's top_logprobs and vLLM's max_logprobs
_MAX_STOPS = 64
_MAX_STOP_CHARS = 1024
_MAX_STOP_IDS = 4096
_MAX_BIASES = 4096


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling of one row. Every value is checked at construction; ParameterError names field, value and limits.

    temperature: 0 (below 1e-5) is greedy; limits 0 to 100.
    top_p: in (0, 1]; keep the smallest set of tokens whose probabilities sum to at least top_p.
    top_k: keep the k best tokens; 0 or -1 keeps all.
    min_p: in [0, 1]; keep tokens at least min_p times as likely as the best.
    max_tokens: most tokens to generate; with min_tokens, EOS and stop ids are impossible before that many.
    stop: strings that end the row, trimmed from the text unless include_stop_str_in_output.
    stop_token_ids: ids that end the row besides EOS; ignore_eos lets the row run past EOS.
    seed: 64 bits; None takes the job's base seed. Randomness also depends on the row's number and the step.
    presence_penalty, frequency_penalty: in [-2, 2], over generated tokens; repetition_penalty: in (0, 100], over
    prompt and generated tokens.
    logprobs: None, or how many top logprobs to report per token; 0 = only the chosen token's; at most 20.
    logit_bias: token id -> value in [-100, 100] added to its logit.
    n: samples per row; only 1 is implemented.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_tokens: int = 512
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logprobs: int | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    skip_special_tokens: bool = True
    n: int = 1

    def __post_init__(self) -> None:
        self._set("temperature", _number("temperature", self.temperature, 0.0, 100.0))
        self._set("top_p", _number("top_p", self.top_p, 0.0, 1.0, above=True))
        self._set("min_p", _number("min_p", self.min_p, 0.0, 1.0))
        for name in ("presence_penalty", "frequency_penalty"):
            self._set(name, _number(name, getattr(self, name), -2.0, 2.0))
        self._set("repetition_penalty", _number("repetition_penalty", self.repetition_penalty, 0.0, 100.0, above=True))
        _integer("top_k", self.top_k, -1, _INT32_MAX)
        self._set("top_k", max(self.top_k, 0))
        _integer("max_tokens", self.max_tokens, 1, _INT32_MAX)
        _integer("min_tokens", self.min_tokens, 0, _INT32_MAX)
        if self.min_tokens > self.max_tokens:
            raise _bad("min_tokens", self.min_tokens, f"at most max_tokens ({self.max_tokens}); raise max_tokens")
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise _bad(name, getattr(self, name), "true or false")
        if self.seed is not None:
            _integer("seed", self.seed, -(2**63), 2**63 - 1)
        if self.logprobs is not None:
            _integer("logprobs", self.logprobs, 0, _MAX_LOGPROBS)
        self._set("stop", _stop_strings(self.stop))
        self._set("stop_token_ids", _stop_ids(self.stop_token_ids))
        self._set("logit_bias", _biases(self.logit_bias))
        _integer("n", self.n, 1, _INT32_MAX)
        if self.n != 1:
            raise ParameterError(
                f"n is {self.n}: only n=1 is implemented; repeat the line, each with its own custom_id, instead",
                param="n",
                code="unsupported_parameter",
            )

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)  # frozen for users; normalised here once

    @property
    def greedy(self) -> bool:
        """True if the best token is always taken."""
        return self.temperature < GREEDY_TEMPERATURE

    @property
    def has_penalties(self) -> bool:
        """True if the logits depend on the tokens already seen."""
        return self.presence_penalty != 0 or self.frequency_penalty != 0 or self.repetition_penalty != 1

    def check_vocabulary(self, vocab_size: int) -> None:
        """Refuse token ids that the model does not have. Raises ParameterError."""
        for name, ids in (("stop_token_ids", self.stop_token_ids), ("logit_bias", tuple(self.logit_bias))):
            for token in ids:
                if token >= vocab_size:
                    raise _bad(name, token, f"below the model's vocabulary size {vocab_size}")


class _ShortRepr(reprlib.Repr):
    """Bounded in length and depth; and repr of a very long int would raise."""

    def repr_int(self, x: int, level: int) -> str:
        return repr(x) if x.bit_length() <= 128 else f"<integer of {x.bit_length()} bits>"


_SHORT = _ShortRepr()


def _bad(name: str, value: object, limits: str) -> ParameterError:
    shown = _SHORT.repr(value)
    return ParameterError(f"{name} is {shown}: it must be {limits}", param=name)


def _number(name: str, value: Any, low: float, high: float, *, above: bool = False) -> float:
    """``value`` as a finite float in [low, high] ((low, high] if ``above``). bool is not a number here."""
    limits = f"a number {'above' if above else 'from'} {low:g} {'and at most' if above else 'to'} {high:g}"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise _bad(name, value, limits)
    # Compared before float(): a huge int compares rightly but overflows in float().
    if not low <= value <= high or (above and value == low) or not math.isfinite(value):
        raise _bad(name, value, limits)
    return float(value)


def _integer(name: str, value: Any, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise _bad(name, value, f"an integer from {low} to {high}")


def _stop_strings(value: Any) -> tuple[str, ...]:
    limits = f"a string or up to {_MAX_STOPS} strings, each of 1 to {_MAX_STOP_CHARS} characters"
    if value is None:
        return ()
    if isinstance(value, str):
        value = (value,)
    if not isinstance(value, (list, tuple)) or len(value) > _MAX_STOPS:
        raise _bad("stop", value, limits)
    for item in value:
        if not isinstance(item, str) or not 1 <= len(item) <= _MAX_STOP_CHARS:
            raise _bad("stop", item, limits)
    return tuple(dict.fromkeys(value))


def _stop_ids(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    if not isinstance(value, (list, tuple, set, frozenset)) or len(value) > _MAX_STOP_IDS:
        raise _bad("stop_token_ids", value, f"a list of up to {_MAX_STOP_IDS} token ids")
    for item in value:
        _integer("stop_token_ids", item, 0, _INT32_MAX)
    return tuple(sorted(set(value)))


def _biases(value: Any) -> dict[int, float]:
    """Keys may be decimal strings, as JSON objects have them."""
    if value is None:
        return {}
    if not isinstance(value, Mapping) or len(value) > _MAX_BIASES:
        raise _bad("logit_bias", value, f"an object of up to {_MAX_BIASES} entries, token id to bias")
    biases: dict[int, float] = {}
    for key, bias in value.items():
        token = key
        # At most 10 digits: int() of a very long string is slow, and no vocabulary needs more.
        if isinstance(key, str) and key.isascii() and key.isdigit() and len(key) <= 10:
            token = int(key)
        _integer("logit_bias", token, 0, _INT32_MAX)
        if token in biases:
            raise _bad("logit_bias", key, "given once per token id")
        biases[token] = _number("logit_bias", bias, -100.0, 100.0)
    return dict(sorted(biases.items()))
