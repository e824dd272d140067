"""From logits to tokens: any mixture of parameters in one batch, and a row's token independent of the batch.

How a row's bits stay its own. Greedy rows need only comparisons, which are exact, and go through one argmax. Every
other row is computed by itself in one scratch row: the same shapes, alignment and operations whether it is alone or
one of 500. Element-wise + - * / and comparisons are exact whatever the thread count; ``exp`` and sums are not (a
vector's tail may take another code path, threads cut elsewhere), so they run in chunks small enough that torch never
splits them. Sums are fp64; one uniform number per token is turned into a token by the inverse of the cumulative
distribution. Cost for a vocabulary of 152,000 on one core: 0.6 to 1.8 ms a row, 0.25 ms for greedy rows
(bench/bench_sampler.py).

Order of operations and definitions as vLLM: logit_bias, penalties, temperature, min_p, top_k, top_p. Log probabilities
are those of the model's own logits, before all of that.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from batchgen_lite.runtime.best_of_row import at_least, best_of_rows, finite_rows, kth_best
from batchgen_lite.runtime.interface import SampledToken
from batchgen_lite.runtime.randomness import uniform
from batchgen_lite.runtime.sampler_logits import SampleRow, change_logits
from batchgen_lite.sampling_params import SamplingParams

__all__ = ["SampleRow", "Sampler"]

_CHUNK = 1 << 14
"""Below torch's grain of 32,768 elements, so that one thread computes a chunk; a multiple of every vector length."""

_FIRST_CANDIDATES = 256
_BLOCK_BYTES = 64 << 20
"""Logits copied from a device at a time."""


class Sampler:
    """Samples one token for each row. Not thread-safe: it owns scratch memory, two rows of the vocabulary's size."""

    def __init__(self) -> None:
        self._work = torch.empty(0)  # [whole chunks] scaled logits, the tail -inf
        self._weights = torch.empty(0)  # [whole chunks] exp of them

    def sample(self, logits: Tensor, rows: Sequence[SampleRow]) -> list[SampledToken]:
        """One token for each of ``rows`` from ``logits`` [n, V] fp32, on any device, not changed.

        A row whose logits are not all finite, or whose parameters leave no token, gets ``error`` set."""
        if logits.shape[0] != len(rows) or logits.dtype != torch.float32:
            raise ValueError(f"logits {tuple(logits.shape)} {logits.dtype} for {len(rows)} rows: need [n, V] float32")
        if not rows:
            return []
        finite = finite_rows(logits)
        best = best_of_rows(logits) if any(map(_takes_best, rows)) else []
        tokens: list[SampledToken] = []
        block_rows = max(1, _BLOCK_BYTES // (logits.shape[1] * 4))
        for first in range(0, len(rows), block_rows):
            chosen = rows[first : first + block_rows]
            needed = any(not _takes_best(row) for row in chosen)
            block = logits[first : first + block_rows].cpu() if needed else logits[:0]
            for i, row in enumerate(chosen):
                if not finite[first + i]:
                    tokens.append(SampledToken(0, error="the model's logits are not finite"))
                elif _takes_best(row):
                    tokens.append(SampledToken(best[first + i]))
                else:
                    tokens.append(self._sample_row(block[i], row))
        return tokens

    def _sample_row(self, logits: Tensor, row: SampleRow) -> SampledToken:
        """``logits`` [V] on the CPU."""
        size = logits.numel()
        self._fit(size)
        work = self._work[:size]
        work.copy_(logits)
        if row.changes_logits:
            change_logits(work, row)
        highest = float(work.amax())
        if not math.isfinite(highest):
            return SampledToken(0, error="logit_bias, penalties and min_tokens leave no token to choose")
        if row.params.greedy:
            token = best_of_rows(work[None])[0]
        else:
            work.sub_(highest).div_(row.params.temperature)
            token = self._draw(size, row.params, uniform(row.seed, row.row, row.step))
        if row.params.logprobs is None:
            return SampledToken(token)
        return self._with_logprobs(logits, token, row.params.logprobs)

    def _fit(self, size: int) -> None:
        unit = min(_CHUNK, -(-size // 64) * 64)  # small vocabularies need no full chunk
        padded = -(-size // unit) * unit
        if self._work.numel() != padded:
            with torch.inference_mode(False):  # usable in and out of inference mode, whichever comes first
                self._work = torch.full((padded,), -math.inf)
                self._weights = torch.empty(padded)
        self._work[size:] = -math.inf

    def _draw(self, size: int, params: SamplingParams, number: float) -> int:
        """The token at ``number`` in [0, 1) of the filtered distribution of the scaled logits in ``_work``, max 0."""
        limit = -math.inf
        if params.min_p > 0:
            limit = math.log(params.min_p)
        if 0 < params.top_k < size:
            # Of the tokens that min_p leaves; and all that equal the k-th, as vLLM has it.
            limit = max(limit, kth_best(self._work[:size], params.top_k))
        if limit == -math.inf and params.top_p >= 1:
            return self._draw_from_all(number)
        if limit > -math.inf:
            ids, weights = self._candidates(size, limit)
            cumulative = weights.cumsum(0)
            total = float(cumulative[-1])
        else:
            ids, cumulative, total = self._nucleus(size, params.top_p)
        if params.top_p < 1:
            # The first token with which the mass reaches top_p is still kept.
            kept = int(torch.searchsorted(cumulative, params.top_p * total)) + 1
            cumulative = cumulative[:kept]
        target = number * float(cumulative[-1])
        return int(ids[min(int(torch.searchsorted(cumulative, target, right=True)), cumulative.numel() - 1)])

    def _candidates(self, size: int, limit: float) -> tuple[Tensor, Tensor]:
        """Ids of scaled logits >= ``limit``, best first, equals by id; and their weights, fp64."""
        work = self._work[:size]
        ids = at_least(work, limit)
        values, order = torch.sort(work[ids], descending=True, stable=True)
        return ids[order], torch.exp(values.to(torch.float64))

    def _nucleus(self, size: int, top_p: float) -> tuple[Tensor, Tensor, float]:
        """Enough of the best tokens to hold ``top_p`` of all the mass: ids, cumulative weights, and all the mass."""
        total = sum(self._exponentiate())
        count = _FIRST_CANDIDATES
        while True:
            limit = -math.inf
            if count < size:
                limit = kth_best(self._work[:size], count)
            ids, weights = self._candidates(size, limit)
            cumulative = weights.cumsum(0)
            if count >= size or float(cumulative[-1]) >= top_p * total:
                return ids, cumulative, total
            count *= 8

    def _exponentiate(self) -> list[float]:
        """``_weights`` = exp(``_work``), and the sum of each chunk, fp64."""
        sums = []
        for first in range(0, self._work.numel(), _CHUNK):
            target = self._weights[first : first + _CHUNK]
            torch.exp(self._work[first : first + _CHUNK], out=target)
            sums.append(float(target.sum(dtype=torch.float64)))
        return sums

    def _draw_from_all(self, number: float) -> int:
        sums = self._exponentiate()
        target = number * sum(sums)
        last = max(i for i, mass in enumerate(sums) if mass > 0)
        chunk = 0
        while chunk < last and target >= sums[chunk]:
            target -= sums[chunk]
            chunk += 1
        weights = self._weights[chunk * _CHUNK : (chunk + 1) * _CHUNK]
        cumulative = weights.cumsum(0, dtype=torch.float64)
        index = int(torch.searchsorted(cumulative, target, right=True))
        if index == weights.numel():  # rounding took the target past the end: the last token with any weight
            index = int(torch.nonzero(weights).amax())
        return chunk * _CHUNK + index

    def _with_logprobs(self, logits: Tensor, token: int, count: int) -> SampledToken:
        size = logits.numel()
        highest = float(logits.amax())
        work = self._work[:size]
        torch.sub(logits, highest, out=work)
        log_total = math.log(sum(self._exponentiate()))
        chosen = float(work[token]) - log_total
        if count == 0:
            return SampledToken(token, chosen)
        ids = at_least(work, kth_best(work, min(count, size)))
        values, order = torch.sort(work[ids], descending=True, stable=True)
        best = zip(ids[order][:count].tolist(), values[:count].tolist(), strict=True)
        return SampledToken(token, chosen, tuple((i, value - log_total) for i, value in best))


def _takes_best(row: SampleRow) -> bool:
    """True where the row's token is the best of the model's own logits and nothing more is asked."""
    return row.params.greedy and row.params.logprobs is None and not row.changes_logits
