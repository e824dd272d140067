"""Rows of fixed length for measurements: random prompts, a fixed number of tokens, no text and no files."""

from __future__ import annotations

import random

from batchgen_lite.runtime.interface import Finish, RequestSize, SampledToken, SequenceRequest
from batchgen_lite.sampling_params import SamplingParams


class _Discard:
    def accept(self, token: SampledToken) -> Finish | None:
        return None

    def done(self, finish: Finish) -> None: ...
    def failed(self, error: BaseException) -> None:
        raise error


class FixedRows:
    """``rows`` prompts of ``context`` random token ids, each answered with ``tokens`` greedy tokens."""

    def __init__(self, rows: int, context: int, tokens: int, vocab: int, seed: int = 0) -> None:
        rng = random.Random(seed)
        self._prompts = [[rng.randrange(vocab) for _ in range(context)] for _ in range(rows)]
        self._params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)

    def __len__(self) -> int:
        return len(self._prompts)

    def size(self, index: int) -> RequestSize:
        return RequestSize(len(self._prompts[index]), self._params.max_tokens)

    def open(self, index: int) -> tuple[SequenceRequest, _Discard]:
        return SequenceRequest(index, self._prompts[index], self._params, seed=0), _Discard()

    def failed(self, index: int, error: BaseException) -> None:
        raise error
