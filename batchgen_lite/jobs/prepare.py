"""From a line's bytes to a row that an engine can run: request, sampling, prompt tokens, context limit, randomness."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from batchgen_lite.errors import ParameterError, RowError
from batchgen_lite.jobs.envelope import Envelope, RowId
from batchgen_lite.jobs.request import LineRequest, read_request
from batchgen_lite.jobs.row_text import TextModel
from batchgen_lite.sampling_mapping import canonical, generation_defaults, merge_sampling
from batchgen_lite.sampling_params import SamplingParams

_KNOWN_PARAMS = 1024

ON_LONG = ("error", "truncate-left", "truncate-right")


@dataclass(frozen=True, slots=True)
class Settings:
    """What holds for every row. ``flags``: sampling parameters by canonical name; ``base_seed``: 64 bits."""

    base_seed: int
    flags: Mapping[str, Any] = field(default_factory=dict)
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    on_long: str = "error"


@dataclass(frozen=True, slots=True)
class PreparedRow:
    """``stream`` and ``seed`` together decide the row's random numbers (see ``randomness``)."""

    request: LineRequest
    params: SamplingParams
    prompt_ids: list[int]
    seed: int
    stream: int


class Preparer:
    """Prepares rows under one set of wishes. Parameters that lines share are checked once."""

    def __init__(self, settings: Settings, text: TextModel) -> None:
        """ParameterError if the flags or the model's own defaults are wrong."""
        self.settings = settings
        self.text = text
        merge_sampling(flags=settings.flags, generation_config=text.generation_config)
        self._defaults = {**generation_defaults(text.generation_config), **canonical(settings.flags)}
        self._known: dict[str, SamplingParams] = {}

    def prepare(self, envelope: Envelope, row: int) -> PreparedRow:
        """RowError if the row cannot be answered as asked."""
        request = read_request(envelope)
        params = self._params(request.sampling)
        prompt_ids = _encode(request, self.settings, self.text)
        prompt_ids, params = fit_context(prompt_ids, params, self.text.max_positions, self.settings.on_long)
        seed, stream = randomness(params.seed, envelope.custom_id, row, self.settings.base_seed)
        return PreparedRow(request, params, prompt_ids, seed, stream)

    def _params(self, given: Mapping[str, Any]) -> SamplingParams:
        """Line over flag over generation_config.json over built-in."""
        key = repr(given)  # tells 1 from 1.0 and from true
        params = self._known.get(key)
        if params is None:
            try:
                params = SamplingParams(**{**self._defaults, **given})
                params.check_vocabulary(self.text.vocab_size)
            except ParameterError as error:
                raise error.as_row_error() from None
            if len(self._known) < _KNOWN_PARAMS:
                self._known[key] = params
        return params


def randomness(own_seed: int | None, custom_id: RowId, row: int, base_seed: int) -> tuple[int, int]:
    """Seed and stream number of a row. A row with a seed of its own depends on that alone: alone, among others and in
    any order it gets the same numbers. Else its id sets it apart, or, where it has none, its position."""
    if own_seed is not None:
        return own_seed % 2**64, 0
    if custom_id is not None:
        digest = hashlib.sha256(json.dumps([base_seed, custom_id]).encode()).digest()
        return int.from_bytes(digest[:8], "little"), 0
    return base_seed, row


def fit_context(
    prompt_ids: list[int], params: SamplingParams, max_positions: int, on_long: str
) -> tuple[list[int], SamplingParams]:
    """Prompt and max_tokens such that both fit into the model's context of ``max_positions`` tokens.

    max_tokens shrinks to what the prompt leaves. A prompt that leaves nothing fails, or is cut to leave room for
    max_tokens, though never below half the context: truncate-left keeps its end, truncate-right its start."""
    length = len(prompt_ids)
    if length >= max_positions:
        if on_long == "error":
            raise RowError(
                "context_length_exceeded",
                f"the prompt has {length} tokens, the model's context {max_positions}, one of which must be left to "
                "generate; shorten it, or use --on-long truncate-left or truncate-right",
                param="prompt",
            )
        keep = max_positions - min(params.max_tokens, max_positions // 2)
        prompt_ids = prompt_ids[-keep:] if on_long == "truncate-left" else prompt_ids[:keep]
    room = max_positions - len(prompt_ids)
    if params.max_tokens <= room:
        return prompt_ids, params
    if params.min_tokens > room:
        raise RowError(
            "context_length_exceeded",
            f"min_tokens is {params.min_tokens}, but the prompt of {length} tokens leaves {room} of the model's "
            f"context of {max_positions}; lower min_tokens or shorten the prompt",
            param="min_tokens",
        )
    return prompt_ids, dataclasses.replace(params, max_tokens=room)


def _encode(request: LineRequest, settings: Settings, text: TextModel) -> list[int]:
    if request.token_ids is not None:
        largest = max(request.token_ids)
        if largest >= text.vocab_size:
            raise RowError(
                "invalid_request",
                f"token_ids holds {largest}: the model's ids end at {text.vocab_size - 1}",
                param="token_ids",
            )
        return request.token_ids
    if request.messages is not None:
        kwargs = {**settings.template_kwargs, **request.template_kwargs}
        ids = text.encode_chat(request.messages, kwargs)
    else:
        ids = text.encode_prompt(request.prompt or "")
    if not ids:
        raise RowError("invalid_request", "the prompt is empty: it gives no token to start from", param="prompt")
    return ids
