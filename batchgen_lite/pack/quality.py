"""What packing costs in quality: the packed model's next-token distributions against the source's, on some text.

Both models run in the engine, under the same memory budget. The text is cut into windows; at several places of each
the distribution of the next token is taken from the whole vocabulary. From these follow the mean Kullback-Leibler
divergence D(source || packed) in nats, and perplexity, exp of the mean negative log-likelihood of the text's own
tokens. A few dozen places in a short text tell a good packing from a broken one; they are no benchmark.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from batchgen_lite.errors import BatchGenError, UsageError
from batchgen_lite.runtime.build import build_engine
from batchgen_lite.runtime.interface import Finish, RequestSize, SampledToken, SequenceRequest
from batchgen_lite.runtime.options import EngineOptions
from batchgen_lite.runtime.sampler import Sampler, SampleRow
from batchgen_lite.sampling_params import SamplingParams

WINDOW = 64  # tokens
_STRIDE = 8  # tokens between places of one window
_MOST_PLACES = 49  # a prefix of 8 to 56 tokens each, about 1,600 tokens in all
_MOST_BYTES = 64 << 20  # of distributions of one model, fp32

TEXT = """\
A lighthouse is a tower that carries a bright lamp, built on a coast or on a rock in the sea to warn ships and to help
them find their way. Before engines and electric light, keepers lived in these towers for months at a time. Every
evening they climbed the stairs, trimmed the wicks, filled the reservoirs with oil and wound up the clockwork that
turned the lens. If the fog came in, they sounded a horn or rang a bell until it had lifted, which could take days.
In 1822 the French engineer Augustin Fresnel designed a lens made of many rings of glass. It bends almost all the light
of a small flame into one narrow beam, so that it can be seen more than thirty kilometres away. The same idea is used
today in headlamps, in projectors and in solar power plants. Sorting a list of n numbers by comparing pairs takes about
n log n steps. Merge sort, for example, splits the list into two halves, sorts each of them by the same method, and then
merges the two sorted halves by taking the smaller of their first elements again and again until both are empty.
"""


@dataclass(frozen=True, slots=True)
class Quality:
    """Figures over ``places`` places. ``kl``: mean D(source || packed) in nats; perplexities of the text;
    ``same_best``: share of places where both models find the same token likeliest."""

    places: int
    kl: float
    source_perplexity: float
    packed_perplexity: float
    same_best: float


def measure_quality(
    source: Path, packed: Path, text: str, options: EngineOptions, vocab_size: int, note: Callable[[str], object]
) -> Quality:
    """Run both models over ``text``. UsageError if it is shorter than nine tokens, else as the engine raises."""
    from batchgen_lite.text.tokenizer import load_tokenizer

    tokens = load_tokenizer(source).encode(text, add_special=False)
    prefixes, targets = _places(tokens, min(_MOST_PLACES, _MOST_BYTES // (4 * vocab_size)))
    if not prefixes:
        raise UsageError(f"the calibration text has {len(tokens)} tokens; at least {_STRIDE + 1} are needed")
    note(f"measuring quality at {len(prefixes)} places of the text")
    reference = _Keeping(len(prefixes), vocab_size)
    _run(source, prefixes, options, reference)
    compared = _Comparing(reference.log_probabilities, targets)
    _run(packed, prefixes, options, compared)
    ours = [float(reference.log_probabilities[row, target]) for row, target in enumerate(targets)]
    count = len(prefixes)
    return Quality(
        places=count,
        kl=sum(compared.divergences) / count,
        source_perplexity=math.exp(-sum(ours) / count),
        packed_perplexity=math.exp(-sum(compared.likelihoods) / count),
        same_best=compared.same_best / count,
    )


def _places(tokens: Sequence[int], most: int) -> tuple[list[list[int]], list[int]]:
    """Prefixes of windows, and the token behind each."""
    prefixes, targets = [], []
    for start in range(0, len(tokens), WINDOW):
        window = list(tokens[start : start + WINDOW])
        for stop in range(_STRIDE, len(window), _STRIDE):
            prefixes.append(window[:stop])
            targets.append(window[stop])
    return prefixes[:most], targets[:most]


class _Keeping(Sampler):
    """Keeps every row's log probabilities: fp32 [rows, vocab], allocated and touched beforehand, so that the engine
    counts them as part of the process."""

    def __init__(self, rows: int, vocab: int) -> None:
        super().__init__()
        self.log_probabilities = torch.zeros(rows, vocab)

    def sample(self, logits: torch.Tensor, rows: Sequence[SampleRow]) -> list[SampledToken]:
        for line, row in zip(logits, rows, strict=True):
            torch.log_softmax(line, 0, out=self.log_probabilities[row.row])
        return super().sample(logits, rows)


class _Comparing(Sampler):
    """Compares every row's distribution with the kept one."""

    def __init__(self, reference: torch.Tensor, targets: Sequence[int]) -> None:
        super().__init__()
        self._reference, self._targets = reference, targets
        self.divergences: list[float] = []
        self.likelihoods: list[float] = []
        self.same_best = 0

    def sample(self, logits: torch.Tensor, rows: Sequence[SampleRow]) -> list[SampledToken]:
        for line, row in zip(logits, rows, strict=True):
            ours, theirs = torch.log_softmax(line, 0), self._reference[row.row]
            # 0 * (-inf - -inf) where neither model gives any probability
            terms = torch.where(theirs.isneginf(), 0.0, theirs.exp() * (theirs - ours))
            self.divergences.append(float(terms.sum(dtype=torch.float64)))
            self.likelihoods.append(float(ours[self._targets[row.row]]))
            self.same_best += int(ours.argmax() == theirs.argmax())
        return super().sample(logits, rows)


class _Rows:
    """A RequestSource: one token after each prefix. The first failure is kept."""

    def __init__(self, prefixes: Sequence[Sequence[int]]) -> None:
        self._prefixes = prefixes
        self._params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
        self.error: BaseException | None = None

    def __len__(self) -> int:
        return len(self._prefixes)

    def size(self, index: int) -> RequestSize:
        return RequestSize(len(self._prefixes[index]), 1)

    def open(self, index: int) -> tuple[SequenceRequest, _Output]:
        return SequenceRequest(index, self._prefixes[index], self._params, seed=0), _Output(self, index)

    def failed(self, index: int, error: BaseException) -> None:
        self.error = self.error or error


@dataclass(frozen=True, slots=True)
class _Output:
    rows: _Rows
    index: int

    def accept(self, token: SampledToken) -> Finish | None:
        if token.error is not None:
            self.rows.failed(self.index, BatchGenError(token.error))
        return Finish("length")

    def done(self, finish: Finish) -> None: ...

    def failed(self, error: BaseException) -> None:
        self.rows.failed(self.index, error)


def _run(model: Path, prefixes: Sequence[Sequence[int]], options: EngineOptions, sampler: Sampler) -> None:
    engine = build_engine(model, options, sampler)
    rows = _Rows(prefixes)
    try:
        asyncio.run(engine.run(rows))
    finally:
        engine.close()
    if rows.error is not None:
        raise rows.error
