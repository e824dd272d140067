"""Paged attention against float64: spans of any length, GQA, latent attention, windows, sinks, int8 KV, exactness."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from attention_truth import Sequence, attend

from batchgen_lite.kernels.attention import quantise_reference as reference
from batchgen_lite.kernels.attention.paged_launch import (
    Int8Scales,
    PageSpan,
    attention_config,
    paged_attention,
    plan_spans,
    workspace_elements,
)
from batchgen_lite.kernels.attention.quantise import quantise_write
from batchgen_lite.kernels.config import Config

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TOLERANCE = {torch.float32: 3e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}
NAN = float("nan")


class Cache:
    """Page pools full of NaN, in which sequences lie on scattered pages."""

    def __init__(
        self, kv_heads: int, depth: int, value_depth: int, lengths: list[int], dtype: torch.dtype, seed: int
    ) -> None:
        rng = np.random.default_rng(seed)
        self.rng, self.dtype, self.kv_heads, self.depth, self.value_depth = rng, dtype, kv_heads, depth, value_depth
        counts = [-(-n // 64) for n in lengths]
        free = list(rng.permutation(sum(counts) + 3))
        # A layer is a strided view of one arena: pages of two layers alternate.
        pools = [torch.full((len(free), 2, kv_heads, 64, d), NAN, dtype=dtype) for d in (depth, value_depth)]
        self.keys, self.values = pools[0][:, 1], pools[1][:, 1]
        self.table = torch.full((len(lengths), max(counts)), -1, dtype=torch.int32)
        self.sequences = []
        for number, length in enumerate(lengths):
            pages = [free.pop() for _ in range(counts[number])]
            self.table[number, : len(pages)] = torch.tensor(pages)
            stored = []
            for pool, width in ((self.keys, depth), (self.values, value_depth)):
                rows = torch.from_numpy(rng.standard_normal((length, kv_heads, width))).to(dtype)
                for position in range(length):
                    pool[pages[position // 64], :, position % 64] = rows[position]
                stored.append(rows.double().numpy())
            self.sequences.append(Sequence(*stored))
        self.keys, self.values, self.table = self.keys.to(DEVICE), self.values.to(DEVICE), self.table.to(DEVICE)

    def queries(self, tokens: int, heads: int) -> torch.Tensor:
        return torch.from_numpy(self.rng.standard_normal((tokens, heads, self.depth))).to(DEVICE, self.dtype)


def run(
    cache: Cache,
    query: torch.Tensor,
    spans: list[PageSpan],
    config: Config | None = None,
    *,
    latent: bool = False,
    **options: object,
) -> torch.Tensor:
    tokens, heads = query.shape[0], query.shape[1]
    group = heads // cache.kv_heads
    config = config or attention_config(DEVICE, cache.keys.dtype, cache.depth, group)
    plan = plan_spans(spans, tokens, group, config, DEVICE)
    out = torch.full((tokens, heads, cache.value_depth), NAN, dtype=query.dtype, device=DEVICE)
    workspace = torch.full((workspace_elements(plan, heads, cache.value_depth),), NAN, device=DEVICE)
    values = None if latent else cache.values
    for launch in paged_attention(query, cache.keys, values, cache.table, plan, out, workspace, **options):  # type: ignore[arg-type]
        launch.run()
    return out


def truth(
    cache: Cache,
    query: torch.Tensor,
    spans: list[PageSpan],
    scale: float,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
) -> np.ndarray:
    wide = query.double().cpu().numpy()
    bias = None if sinks is None else sinks.double().cpu().numpy()
    out = np.full((*wide.shape[:2], cache.value_depth), NAN)
    for span in spans:
        sequence = cache.sequences[span.sequence]
        for i in range(span.count):
            end = span.start + i + 1
            out[span.row + i] = attend(
                wide[span.row + i], sequence.keys[:end], sequence.values[:end], scale, window, bias
            )
    return out


def close(actual: torch.Tensor, expected: np.ndarray, tolerance: float) -> None:
    """Same rows written, and those within ``tolerance`` of values near 1."""
    got = actual.double().cpu().numpy()
    assert np.array_equal(np.isnan(got), np.isnan(expected))
    assert float(np.nanmax(np.abs(got - expected))) <= tolerance


@pytest.mark.parametrize(
    ("heads", "kv_heads", "depth", "value_depth"),
    [
        pytest.param(4, 2, 16, 16, id="grouped"),
        pytest.param(3, 3, 24, 40, id="one-to-one-odd"),
        pytest.param(6, 2, 33, 16, id="group-of-3"),
    ],
)
def test_spans_of_any_length(heads: int, kv_heads: int, depth: int, value_depth: int) -> None:
    cache = Cache(kv_heads, depth, value_depth, [1, 70, 129], torch.float32, seed=1)
    spans = [PageSpan(2, 128, 0, 1), PageSpan(0, 0, 1, 1), PageSpan(1, 60, 3, 10)]
    query = cache.queries(14, heads)  # rows 2 and 13 belong to no span
    close(run(cache, query, spans, scale=0.3), truth(cache, query, spans, 0.3), TOLERANCE[torch.float32])


@pytest.mark.parametrize("window", [1, 5, 64, 100])
def test_windows_skip_pages_but_not_positions(window: int) -> None:
    cache = Cache(1, 16, 16, [150], torch.float32, seed=2)
    spans = [PageSpan(0, 120, 0, 20)]
    query = cache.queries(20, 2)
    got = run(cache, query, spans, Config(4, 1, block_m=16, block_k=32, split=1), scale=0.3, window=window)
    close(got, truth(cache, query, spans, 0.3, window), TOLERANCE[torch.float32])


def test_sinks_join_the_denominator() -> None:
    cache = Cache(2, 16, 16, [70], torch.float32, seed=3)
    spans = [PageSpan(0, 0, 0, 3), PageSpan(0, 69, 3, 1)]
    query = cache.queries(4, 4)
    sinks = torch.tensor([-30.0, 0.5, 2.0, 30.0], device=DEVICE)
    close(run(cache, query, spans, scale=0.3, sinks=sinks), truth(cache, query, spans, 0.3, sinks=sinks), 3e-6)


def test_latent_attention_shares_key_and_value() -> None:
    """MLA: one KV head, more query heads than a tile has rows, the value is the key's first channels."""
    cache = Cache(1, 32 + 8, 32, [67], torch.float32, seed=4)
    cache.sequences = [Sequence(s.keys, s.keys[:, :, :32]) for s in cache.sequences]
    spans = [PageSpan(0, 64, 0, 3)]
    query = cache.queries(3, 20)
    close(run(cache, query, spans, latent=True, scale=0.2), truth(cache, query, spans, 0.2), 3e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype: torch.dtype) -> None:
    cache = Cache(1, 16, 16, [70], dtype, seed=5)
    spans = [PageSpan(0, 66, 0, 4)]
    query = cache.queries(4, 2)
    close(run(cache, query, spans, scale=0.3), truth(cache, query, spans, 0.3), TOLERANCE[dtype])


def test_many_splits_merge_in_order() -> None:
    cache = Cache(1, 16, 16, [200], torch.float32, seed=6)
    spans = [PageSpan(0, 198, 0, 2)]
    query = 4 * cache.queries(2, 2)
    got = run(cache, query, spans, Config(4, 1, block_m=16, block_k=64, split=1), scale=1.0)
    close(got, truth(cache, query, spans, 1.0), 2e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tokens_bits_do_not_depend_on_spans_or_neighbours(dtype: torch.dtype) -> None:
    cache = Cache(1, 16, 16, [140, 40], dtype, seed=7)
    config = Config(4, 1, block_m=16, block_k=64, split=1)
    query = cache.queries(15, 2)
    whole = [PageSpan(0, 125, 0, 15)]
    together = run(cache, query, whole, config, scale=0.5, window=70)
    cut = [PageSpan(0, 134, 9, 6), PageSpan(0, 125, 0, 1), PageSpan(0, 126, 1, 8)]
    assert torch.equal(run(cache, query, cut, config, scale=0.5, window=70), together)
    for row in (0, 3, 14):
        mixed = torch.cat([cache.queries(2, 2), query[row : row + 1]])
        spans = [PageSpan(1, 38, 0, 2), PageSpan(0, 125 + row, 2, 1)]
        assert torch.equal(run(cache, mixed, spans, config, scale=0.5, window=70)[2], together[row])


def quantised(cache: Cache) -> tuple[Int8Scales, list[Sequence]]:
    """The cache's pools as int8, everything that is not written left as garbage; returns what they mean."""
    positions = [
        (number, at, int(cache.table[number, at // 64]) * 64 + at % 64)
        for number, sequence in enumerate(cache.sequences)
        for at in range(len(sequence.keys))
    ]
    slots = torch.tensor([slot for _, _, slot in positions], device=DEVICE)
    pools, scales, meant = [], [], []
    for source in (cache.keys, cache.values):
        rows = source[slots // 64, :, slots % 64]
        pool = torch.full(source.shape, 99, dtype=torch.int8, device=DEVICE)
        scale = torch.full(source.shape[:3], NAN, device=DEVICE)
        quantise_write(rows, pool, scale, slots).run()
        pools.append(pool)
        scales.append(scale)
        meant.append((pool.double() * scale.double().unsqueeze(-1)).cpu().numpy())
    cache.keys, cache.values = pools
    coarse = []
    for number in range(len(cache.sequences)):
        own = [slot for owner, _, slot in positions if owner == number]
        rows = [np.stack([part[slot // 64, :, slot % 64] for slot in own]) for part in meant]
        coarse.append(Sequence(*rows))
    return Int8Scales(*scales), coarse


@pytest.mark.parametrize("window", [None, 70])
def test_int8_pages(window: int | None) -> None:
    cache = Cache(2, 16, 24, [64, 140], torch.float32, seed=8)
    int8, cache.sequences = quantised(cache)
    spans = [PageSpan(1, 123, 0, 10), PageSpan(0, 63, 10, 1)]
    query = cache.queries(11, 4)
    got = run(cache, query, spans, scale=0.3, window=window, int8=int8)
    close(got, truth(cache, query, spans, 0.3, window), 3e-6)
    for row in (0, 4, 5, 9):  # the same tokens one by one
        alone = [PageSpan(1, 123 + row, 0, 1)]
        single = run(cache, query[row : row + 1], alone, scale=0.3, window=window, int8=int8)
        assert torch.equal(single[0], got[row])


def test_int8_latent_pages_share_their_scale() -> None:
    cache = Cache(1, 32 + 8, 32, [70], torch.float32, seed=11)
    int8, coarse = quantised(cache)
    cache.sequences = [Sequence(s.keys, s.keys[:, :, :32]) for s in coarse]
    spans = [PageSpan(0, 66, 0, 2)]
    query = cache.queries(2, 3)
    shared = Int8Scales(int8.keys, int8.keys)
    close(run(cache, query, spans, latent=True, scale=0.2, int8=shared), truth(cache, query, spans, 0.2), 3e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_kernel_and_torch_quantise_alike_and_to_the_nearest(dtype: torch.dtype) -> None:
    rows = torch.from_numpy(np.random.default_rng(10).standard_normal((5, 3, 24)) * 3).to(DEVICE, dtype)
    rows[0, 1] = 0.0
    slots = torch.tensor([64, 3, 127, 70, 0], device=DEVICE)
    results = []
    for quantise in (lambda *operands: quantise_write(*operands).run(), reference.quantise_write):
        pages = torch.full((3, 3, 64, 24), 99, dtype=torch.int8, device=DEVICE)
        scales = torch.full((3, 3, 64), -1.0, device=DEVICE)
        quantise(rows, pages, scales, slots)
        results.append((pages, scales))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
    pages, scales = results[0]
    assert bool((pages[2] == 99).all())
    assert int((scales >= 0).sum()) == 15
    q, scale = pages[slots // 64, :, slots % 64], scales[slots // 64, :, slots % 64]
    assert float(scale[0, 1]) == 0.0
    assert not bool(q[0, 1].any())
    assert set(q.abs().amax(-1).flatten().tolist()) == {0, 127}
    error = (reference.dequantise(q, scale).double() - rows.double()).abs()
    assert bool((error <= 0.5001 * scale.double().unsqueeze(-1)).all())


@pytest.mark.parametrize("bad", [NAN, float("inf"), -float("inf")])
def test_what_is_not_finite_stays_so(bad: float) -> None:
    rows = torch.ones(2, 1, 16, device=DEVICE)
    rows[1, 0, 5] = bad
    for quantise in (lambda *operands: quantise_write(*operands).run(), reference.quantise_write):
        pages = torch.zeros((1, 1, 64, 16), dtype=torch.int8, device=DEVICE)
        scales = torch.zeros((1, 1, 64), device=DEVICE)
        quantise(rows, pages, scales, torch.tensor([0, 1], device=DEVICE))
        assert scales.isfinite().flatten().tolist() == [True, False] + [True] * 62
        read = reference.dequantise(pages[0, 0, 1], scales[0, 0, 1])
        assert not bool(read.isfinite().all())
