"""Changes to one row's logits before sampling: bias, stop ids before min_tokens, penalties. Each as vLLM defines it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from batchgen_lite.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class SampleRow:
    """One row to sample. ``step`` is the number of tokens generated before, ``output_ids`` those tokens, ``stop_ids``
    the model's EOS ids: they and params.stop_token_ids are impossible while fewer than min_tokens tokens are there."""

    params: SamplingParams
    seed: int
    row: int
    step: int
    prompt_ids: Sequence[int] = ()
    output_ids: Sequence[int] = ()
    stop_ids: frozenset[int] = frozenset()

    @property
    def suppresses_stops(self) -> bool:
        return self.step < self.params.min_tokens and bool(self.stop_ids or self.params.stop_token_ids)

    @property
    def changes_logits(self) -> bool:
        return self.suppresses_stops or bool(self.params.logit_bias) or self.params.has_penalties


def change_logits(logits: Tensor, row: SampleRow) -> None:
    """Apply bias, suppression and penalties to ``logits`` [V] fp32 in place, in vLLM's order."""
    params = row.params
    if params.logit_bias:
        ids = torch.tensor([i for i in params.logit_bias if i < logits.numel()], dtype=torch.int64)
        logits[ids] += torch.tensor([v for i, v in params.logit_bias.items() if i < logits.numel()])
    if row.suppresses_stops:
        stops = [i for i in {*row.stop_ids, *params.stop_token_ids} if i < logits.numel()]
        logits[torch.tensor(stops, dtype=torch.int64)] = -math.inf
    if params.has_penalties:
        _penalise(logits, row)


def _penalise(logits: Tensor, row: SampleRow) -> None:
    """repetition: logits of tokens in prompt or output are divided by it where positive, else multiplied; frequency:
    minus it times the count in the output; presence: minus it once for tokens in the output."""
    params = row.params
    output = torch.as_tensor(list(row.output_ids), dtype=torch.int64)
    if params.repetition_penalty != 1:
        prompt = torch.as_tensor(list(row.prompt_ids), dtype=torch.int64)
        seen = torch.unique(torch.cat([prompt, output]))
        values = logits[seen]
        penalty = params.repetition_penalty
        logits[seen] = torch.where(values > 0, values / penalty, values * penalty)
    if output.numel() and (params.frequency_penalty or params.presence_penalty):
        ids, counts = torch.unique(output, return_counts=True)
        logits[ids] -= params.frequency_penalty * counts.to(torch.float32)
        logits[ids] -= params.presence_penalty
