"""How many blocks of attention go through one call: bits do not depend on it, memory stays within what is planned."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from batchgen_lite.kernels.attention import blocking
from batchgen_lite.kernels.attention.blocking import BLOCK_ROWS, BLOCKS, MOST_BLOCKS, blocks_at_once
from batchgen_lite.kernels.attention.reference import SpanRows, paged_attention, plan_attention
from batchgen_lite.kernels.temporaries import kept_sizes
from batchgen_lite.runtime.activations import ActivationShape


def attend(spans: list[SpanRows], kv_heads: int, group: int, depth: int, window: int | None) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    tokens = sum(span.count for span in spans)
    pages = 1 + max(page for span in spans for page in span.pages)
    keys, values = torch.randn(2, pages, kv_heads, 64, depth, generator=generator).to(torch.bfloat16)
    query = torch.randn(tokens, kv_heads * group, depth, generator=generator)
    out = torch.empty_like(query)
    plan = plan_attention(spans, group, kv_heads, window)
    paged_attention(query, keys, values, plan, scale=depth**-0.5, window=window, out=out)
    return out


def decoding(lengths: list[int]) -> list[SpanRows]:
    return [
        SpanRows(row, length - 1, 1, [(3 * row + i) % 40 for i in range(-(-length // 64))])
        for row, length in enumerate(lengths)
    ]


@pytest.mark.parametrize("window", [None, 70])
def test_bits_do_not_depend_on_the_blocks_of_a_call(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengths such that of the blocks that one call takes some see a page as a whole and some do not."""
    spans = decoding([64] * 17 + [5 + 3 * i for i in range(40)] + [192] * 18 + [190])
    got = attend(spans, 4, 2, 32, window)
    monkeypatch.setattr(blocking, "MOST_BLOCKS", BLOCKS)
    assert blocks_at_once(4, 4, 32) == BLOCKS
    assert torch.equal(attend(spans, 4, 2, 32, window), got)


@pytest.mark.parametrize("threads", [2, 3, 8])
@pytest.mark.parametrize("depth", [24, 40, 64, 72, 128])
def test_bits_do_not_depend_on_the_number_of_threads(depth: int, threads: int) -> None:
    """One block of one KV head: the one product whose columns MKL shares out among threads by itself."""
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = attend(decoding([130]), 1, 4, depth, None)
        torch.set_num_threads(threads)
        assert torch.equal(attend(decoding([130]), 1, 4, depth, None), alone)
    finally:
        torch.set_num_threads(before)


def test_more_blocks_where_they_are_small() -> None:
    assert blocks_at_once(4, 4, 64) == MOST_BLOCKS
    assert blocks_at_once(4, 4, 128) == 32
    assert blocks_at_once(4, 32, 128) == BLOCKS
    assert blocks_at_once(32, 4, 64) == 32
    assert blocks_at_once(64, 1, 64) == BLOCKS
    assert all(blocks_at_once(rows, 2, 64) % BLOCKS == 0 for rows in BLOCK_ROWS)


@pytest.mark.parametrize(("kv_heads", "group", "depth"), [(4, 4, 64), (8, 1, 128), (2, 8, 128), (1, 2, 32)])
@pytest.mark.parametrize("prompt", [1, 200])
def test_temporaries_stay_within_what_is_planned(kv_heads: int, group: int, depth: int, prompt: int) -> None:
    spans = [SpanRows(row * prompt, 0, prompt, [row % 20 + i for i in range(4)]) for row in range(1 + 200 // prompt)]
    shape = ActivationShape(*[0] * 10, kv_heads=kv_heads, head_dim=depth, kv_itemsize=2)
    kept: list[int] = []

    def run() -> None:
        attend(spans, kv_heads, group, depth, None)
        kept.extend(kept_sizes().values())

    with ThreadPoolExecutor(1) as fresh:  # buffers are a thread's own
        fresh.submit(run).result()
    assert 0 < sum(kept) <= shape.transient_bytes(0)
