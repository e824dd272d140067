"""Paged attention in torch: against float64, and bit for bit whatever the cut into spans, pages and batches."""

from __future__ import annotations

import pytest
import torch

from batchgen_lite.kernels.attention.reference import PAGE, SpanRows, paged_attention, plan_attention


class Cache:
    """One sequence's keys and values, spread over pages of a pool in a scrambled order."""

    def __init__(self, length: int, kv_heads: int, depth: int, value_depth: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.length, self.kv_heads = length, kv_heads
        self.key = torch.randn(length, kv_heads, depth, generator=generator)
        self.value = torch.randn(length, kv_heads, value_depth, generator=generator)

    def fill(self, keys: torch.Tensor, values: torch.Tensor, pages: list[int]) -> None:
        position = torch.arange(self.length)
        page = torch.tensor(pages)[position // PAGE]
        keys[page, :, position % PAGE] = self.key
        values[page, :, position % PAGE] = self.value


def truth(
    query: torch.Tensor, cache: Cache, scale: float, window: int | None, sinks: torch.Tensor | None
) -> torch.Tensor:
    """float64 softmax attention of all positions; ``query`` [length, Hq, D]."""
    group = query.shape[1] // cache.kv_heads
    key = cache.key.double().repeat_interleave(group, 1)
    value = cache.value.double().repeat_interleave(group, 1)
    scores = torch.einsum("thd,shd->hts", query.double(), key) * scale
    t, s = torch.meshgrid(torch.arange(cache.length), torch.arange(cache.length), indexing="ij")
    hidden = (s > t) if window is None else (s > t) | (s <= t - window)
    scores = scores.masked_fill(hidden, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.double()[:, None, None].expand(-1, cache.length, 1)], -1)
    weights = scores.softmax(-1)[..., : cache.length]
    return torch.einsum("hts,shd->thd", weights, value)


def attend(
    lengths: list[int],
    cuts: list[int],
    *,
    heads: int,
    kv_heads: int,
    depth: int,
    value_depth: int,
    window: int | None = None,
    with_sinks: bool = False,
    garbage: float = float("nan"),
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Outputs of the last ``cuts[i]`` positions of each sequence, all in one call, and the truth for them."""
    caches = [Cache(length, kv_heads, depth, value_depth, seed) for seed, length in enumerate(lengths)]
    needed = [-(-length // PAGE) for length in lengths]
    order = torch.randperm(sum(needed), generator=torch.Generator().manual_seed(5)).tolist()
    keys = torch.full((len(order), kv_heads, PAGE, depth), garbage)
    values = torch.zeros(len(order), kv_heads, PAGE, value_depth)
    spans, queries, expected = [], [], []
    sinks = torch.randn(heads, generator=torch.Generator().manual_seed(9)) if with_sinks else None
    row = 0
    for seed, (cache, count, cut) in enumerate(zip(caches, needed, cuts, strict=True)):
        pages, order = order[:count], order[count:]
        cache.fill(keys, values, pages)
        query = torch.randn(cache.length, heads, depth, generator=torch.Generator().manual_seed(100 + seed))
        expected.append(truth(query, cache, 0.3, window, sinks)[cache.length - cut :])
        queries.append(query[cache.length - cut :])
        spans.append(SpanRows(row, cache.length - cut, cut, pages))
        row += cut
    out = torch.full((row, heads, value_depth), float("nan"))
    plan = plan_attention(spans, heads // kv_heads, kv_heads, window)
    paged_attention(torch.cat(queries), keys, values, plan, scale=0.3, window=window, sinks=sinks, out=out)
    return list(out.split(cuts)), expected


SHAPES = [
    {"heads": 4, "kv_heads": 2, "depth": 20, "value_depth": 20},
    {"heads": 6, "kv_heads": 1, "depth": 28, "value_depth": 12},
    {"heads": 3, "kv_heads": 3, "depth": 64, "value_depth": 64},
    {"heads": 16, "kv_heads": 1, "depth": 40, "value_depth": 32},
]


@pytest.mark.parametrize("window", [None, 1, 30, 100])
@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "-".join(map(str, shape.values())))
def test_matches_float64(shape: dict[str, int], with_sinks: bool, window: int | None) -> None:
    lengths = [1, 2, 63, 64, 65, 130, 200]
    outputs, expected = attend(lengths, [1, 2, 1, 64, 3, 130, 70], window=window, with_sinks=with_sinks, **shape)
    for got, wanted in zip(outputs, expected, strict=True):
        assert not got.isnan().any()
        # fp32: a score of size 8 is off by up to 1e-6, and its weight by as much in proportion.
        assert float((got - wanted).abs().max()) < 1e-5


@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "-".join(map(str, shape.values())))
def test_a_rows_bits_do_not_depend_on_span_or_batch(shape: dict[str, int], window: int | None) -> None:
    whole, _ = attend([200], [200], window=window, **shape)
    for cut in (1, 2, 5, 17, 64, 128):
        part, _ = attend([200], [cut], window=window, **shape)
        assert torch.equal(part[0], whole[0][-cut:]), cut
    among, _ = attend([200, 31, 64, *range(100, 180, 9)], [9, 31, 1, *[1] * 9], window=window, **shape)
    assert torch.equal(among[0], whole[0][-9:])


def test_what_lies_behind_a_sequence_does_not_matter() -> None:
    shape = SHAPES[0]
    clean, _ = attend([70], [70], garbage=0.0, **shape)
    dirty, _ = attend([70], [70], garbage=float("inf"), **shape)
    assert torch.equal(clean[0], dirty[0])


def test_threads_do_not_change_bits() -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one, _ = attend([300] * 20, [7] * 20, **SHAPES[0])
        torch.set_num_threads(2)
        two, _ = attend([300] * 20, [7] * 20, **SHAPES[0])
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
