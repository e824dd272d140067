"""The sampler against a plain fp64 reference, its distribution, and its independence of batch, order and threads."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from batchgen_lite.runtime.sampler import Sampler, SampleRow
from batchgen_lite.runtime.sampler_logits import change_logits
from batchgen_lite.sampling_params import SamplingParams

MIXTURE: list[dict[str, Any]] = [
    {"temperature": 0},
    {},
    {"temperature": 0.7, "top_p": 0.9},
    {"top_k": 7},
    {"top_k": 50, "top_p": 0.5, "temperature": 1.4},
    {"min_p": 0.05},
    {"min_p": 0.02, "top_k": 20, "top_p": 0.95},
    {"temperature": 0, "repetition_penalty": 1.3},
    {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": -0.4, "top_p": 0.99},
    {"logit_bias": {3: 5.0, 4: -100}, "logprobs": 3},
    {"logprobs": 0, "temperature": 0},
    {"min_tokens": 9, "temperature": 0.3},
    {"top_p": 0.01},
]


def make_rows(count: int, seed: int = 5) -> list[SampleRow]:
    return [
        SampleRow(
            SamplingParams(**MIXTURE[i % len(MIXTURE)]),
            seed=seed,
            row=i,
            step=i % 11,
            prompt_ids=[1, 2, 3, i % 40],
            output_ids=[(i * 7 + j // 3) % 90 for j in range(i % 11)],
            stop_ids=frozenset({0, 17}),
        )
        for i in range(count)
    ]


def make_logits(count: int, size: int, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(count, size, generator=torch.Generator().manual_seed(seed)) * scale


def reference_logits(logits: torch.Tensor, row: SampleRow) -> npt.NDArray[np.float64]:
    """Logits after bias, suppression and penalties by the published definitions, in numpy fp64."""
    x = logits.double().numpy().copy()
    p = row.params
    for token, bias in p.logit_bias.items():
        x[token] += bias
    if row.step < p.min_tokens:
        x[[*row.stop_ids, *p.stop_token_ids]] = -np.inf
    for token in {*row.prompt_ids, *row.output_ids}:
        x[token] = x[token] / p.repetition_penalty if x[token] > 0 else x[token] * p.repetition_penalty
    for token, count in Counter(row.output_ids).items():
        x[token] -= p.frequency_penalty * count + p.presence_penalty
    return x


def reference_distribution(logits: torch.Tensor, row: SampleRow) -> npt.NDArray[np.float64]:
    """Probabilities of every token by the published definitions, one step after the other."""
    x, p = reference_logits(logits, row), row.params
    if p.greedy:
        return np.eye(len(x))[int(np.argmax(x))]
    x = x / p.temperature
    prob = np.exp(x - x.max())
    prob /= prob.sum()
    prob[prob < p.min_p * prob.max()] = 0
    if p.top_k:
        prob[prob < np.sort(prob)[-p.top_k]] = 0
    prob /= prob.sum()
    order = np.argsort(-prob, kind="stable")
    before = np.cumsum(prob[order]) - prob[order]
    prob[order[before >= p.top_p]] = 0
    return prob / prob.sum()


@pytest.mark.parametrize("index", range(len(MIXTURE)), ids=[str(m) for m in MIXTURE])
def test_frequencies_follow_the_reference(index: int) -> None:
    """Chi-square over 2,000 draws of one row at fixed seeds; nothing outside the support is ever drawn."""
    base = make_rows(len(MIXTURE))[index]
    logits = make_logits(1, 90, seed=index, scale=1.5)
    expected = reference_distribution(logits[0], base)
    draws = 2000
    rows = [
        SampleRow(base.params, s, base.row, base.step, base.prompt_ids, base.output_ids, base.stop_ids)
        for s in range(draws)
    ]
    tokens = [t.token for t in Sampler().sample(logits.expand(draws, -1).contiguous(), rows)]
    counts = np.bincount(tokens, minlength=90)
    assert counts[expected == 0].sum() == 0
    likely = expected * draws >= 5
    observed = np.append(counts[likely], counts[~likely].sum())
    wanted = np.append(expected[likely], expected[~likely].sum()) * draws
    kept = wanted > 0
    statistic = float((((observed - wanted) ** 2)[kept] / wanted[kept]).sum())
    freedom = max(1, int(kept.sum()) - 1)
    # Wilson-Hilferty: this bound is exceeded with probability below 1e-5.
    bound = freedom * (1 - 2 / (9 * freedom) + 4.3 * math.sqrt(2 / (9 * freedom))) ** 3
    assert statistic < bound


@pytest.mark.parametrize(
    "params",
    [
        {"frequency_penalty": 0.7},
        {"presence_penalty": -0.3},
        {"repetition_penalty": 1.4},
        {
            "repetition_penalty": 0.8,
            "frequency_penalty": -0.2,
            "presence_penalty": 1.1,
            "logit_bias": {"1": -7, "21": 3},
        },
        {"min_tokens": 50, "logit_bias": {"17": 100}, "stop_token_ids": [40, 41]},
    ],
    ids=str,
)
def test_logits_are_changed_as_defined(params: dict[str, Any]) -> None:
    logits = make_logits(1, 90)[0]
    row = SampleRow(SamplingParams(**params), 0, 0, 6, [1, 2, 2, 30], [21, 21, 21, 30, 4, 4], frozenset({0, 17}))
    changed = logits.clone()
    change_logits(changed, row)
    np.testing.assert_allclose(changed.numpy(), reference_logits(logits, row), rtol=1e-5, atol=1e-5)
    assert not torch.equal(changed, logits)


@pytest.mark.parametrize("size", [90, 1000, 32771, 70001])
def test_a_row_is_bitwise_the_same_alone_in_a_crowd_and_in_any_order(size: int) -> None:
    count = 39 if size < 40000 else 26
    logits, rows = make_logits(count, size), make_rows(count)
    together = Sampler().sample(logits, rows)
    assert Sampler().sample(logits.flip(0), rows[::-1])[::-1] == together
    shared = Sampler()
    for i in range(count):
        assert shared.sample(logits[i : i + 1], rows[i : i + 1]) == [together[i]]
    # Not contiguous, and at another alignment.
    padded = torch.zeros(count, size + 3)
    padded[:, 1 : size + 1] = logits
    assert Sampler().sample(padded[:, 1 : size + 1], rows) == together


def test_the_thread_count_changes_nothing() -> None:
    logits, rows = make_logits(26, 150_001), make_rows(26)
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(Sampler().sample(logits, rows))
    finally:
        torch.set_num_threads(before)
    assert results[0] == results[1] == results[2]


def test_inference_mode_or_not() -> None:
    logits, rows = make_logits(13, 500), make_rows(13)
    sampler = Sampler()
    with torch.inference_mode():
        inside = sampler.sample(logits.clone(), rows)
    assert sampler.sample(logits, rows) == inside


def test_blocks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, rows = make_logits(40, 300), make_rows(40)
    whole = Sampler().sample(logits, rows)
    monkeypatch.setattr("batchgen_lite.runtime.sampler._BLOCK_BYTES", 3 * 300 * 4)
    assert Sampler().sample(logits, rows) == whole


def test_the_callers_logits_stay_as_they_are() -> None:
    logits, rows = make_logits(26, 200), make_rows(26)
    copy = logits.clone()
    Sampler().sample(logits, rows)
    assert torch.equal(logits, copy)


def test_greedy_takes_the_lowest_of_equals() -> None:
    logits = torch.zeros(2, 50_000)
    logits[:, [7, 40_000, 3, 49_999]] = 2.0
    plain = SampleRow(SamplingParams(temperature=0), 0, 0, 0)
    biased = SampleRow(SamplingParams(temperature=0, logit_bias={9: 1.0}), 0, 1, 0)
    assert [t.token for t in Sampler().sample(logits, [plain, biased])] == [3, 3]


def test_logprobs_are_those_of_the_models_own_logits() -> None:
    logits = make_logits(3, 40_000)
    params = SamplingParams(temperature=2.0, top_k=4, logit_bias={5: 100}, logprobs=6)
    for row, token in enumerate(Sampler().sample(logits, [SampleRow(params, 1, i, 0) for i in range(3)])):
        expected = torch.log_softmax(logits[row].double(), 0)
        assert token.token == 5
        assert token.logprob == pytest.approx(expected[5].item(), abs=1e-5)
        values, ids = expected.topk(6)
        assert [i for i, _ in token.top_logprobs] == ids.tolist()
        assert [v for _, v in token.top_logprobs] == pytest.approx(values.tolist(), abs=1e-5)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_rows_that_are_not_finite_are_errors_and_leave_others_alone(value: float) -> None:
    logits, rows = make_logits(26, 100), make_rows(26)
    good = Sampler().sample(logits, rows)
    logits[4, 50] = logits[13, 99] = value
    tokens = Sampler().sample(logits, rows)
    assert [i for i, t in enumerate(tokens) if t.error is not None] == [4, 13]
    assert [t for i, t in enumerate(tokens) if i not in (4, 13)] == [t for i, t in enumerate(good) if i not in (4, 13)]


def test_no_token_left_is_an_error() -> None:
    params = SamplingParams(min_tokens=1, temperature=0.5)
    row = SampleRow(params, 0, 0, 0, stop_ids=frozenset(range(4)))
    (token,) = Sampler().sample(torch.zeros(1, 4), [row])
    assert token.error is not None
    assert "min_tokens" in token.error


def test_stop_ids_come_back_after_min_tokens() -> None:
    logits = torch.zeros(2, 10)
    logits[:, 3] = 50.0
    params = SamplingParams(min_tokens=2, temperature=0)
    rows = [SampleRow(params, 0, 0, step, output_ids=[1] * step, stop_ids=frozenset({3})) for step in (1, 2)]
    assert [t.token for t in Sampler().sample(logits, rows)] == [0, 3]


def test_extreme_distributions() -> None:
    """One token with all the mass, a flat one that needs every candidate, and a temperature near zero."""
    sure = torch.full((1, 30_000), -500.0)
    sure[0, 29_999] = 500.0
    flat = torch.zeros(1, 30_000)
    sampler = Sampler()
    for params in (SamplingParams(), SamplingParams(top_p=0.5), SamplingParams(min_p=0.1), SamplingParams(top_k=5)):
        assert sampler.sample(sure, [SampleRow(params, 1, 1, 1)])[0].token == 29_999
    tokens = [sampler.sample(flat, [SampleRow(SamplingParams(top_p=0.5), s, 0, 0)])[0].token for s in range(60)]
    assert max(tokens) < 15_000  # equals are kept in order of their ids
    assert len(set(tokens)) > 50
    cold = SampleRow(SamplingParams(temperature=1e-4), 1, 0, 0)
    logits = make_logits(1, 30_000)
    assert sampler.sample(logits, [cold])[0].token == int(logits.argmax())


def test_no_rows() -> None:
    assert Sampler().sample(torch.zeros(0, 5), []) == []


def test_wrong_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="need"):
        Sampler().sample(torch.zeros(2, 5), [])
