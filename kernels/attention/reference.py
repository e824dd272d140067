"""Attention over KV pages in torch: the CPU's production path.

Exactness decides the shape of this file. A token's output must not depend on the batch, on how its prompt was cut
into spans, or on pages behind it. So the unit of arithmetic is fixed: one *block* of query rows of one sequence
against one page of 64 positions, a GEMM whose inner dimensions never vary; partial results of a block (maximum, sum,
weighted values) are merged strictly in page order, as in Flash-Decoding (Dao et al. 2023). Pages that a row may not
see contribute exact zeros. MKL gives a row the same bits for any number of rows per block and any number of blocks
(tests/kernels/test_attention_blocking.py), so short spans use small blocks.

Blocks are sorted by their number of pages, longest first. Then the blocks that have an r-th page are a prefix,
queries and running results are contiguous slices, and only the pages themselves are gathered. Queries get into that
order, and results out of it, by one look-up of whole rows each (a sixth of the time of torch's general indexing).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from batchgen_lite.kernels.attention.blocking import BLOCK_ROWS, BLOCKS, PAGE, blocks_at_once
from batchgen_lite.kernels.temporaries import temporary

MASKED = -1e30  # of scores out of sight; exp of it is exactly 0, and unlike -inf it cannot make a NaN
LEAST = -80.0
"""Scores so far below a row's largest count as this far: a weight of 2e-35 is nothing beside one of 1. exp of less is a
denormal number or none, for which MKL takes 20 to 100 times as long on some processors."""

Scales = tuple[torch.Tensor, torch.Tensor]
"""Of int8 keys and of int8 values, fp32 [P, Hkv, 64] each."""

_Block = tuple[list[int], list[int], list[int], int]  # rows, their positions, pages, index of the first page


@dataclass(frozen=True, slots=True)
class SpanRows:
    """One span of a slice: queries of positions [start, start + count) lie in rows [row, row + count) of the slice;
    ``pages`` are the sequence's pages from position 0 on, covering start + count positions."""

    row: int
    start: int
    count: int
    pages: Sequence[int]


@dataclass(frozen=True, slots=True)
class BlockGroup:
    """All blocks of one row count: B blocks of R rows, for each of Hkv KV heads; a row is (token, query head within the
    KV head's group)."""

    queries: torch.Tensor  # int64 [B, Hkv, R]: token * Hq + query head; padding has token 0
    position: torch.Tensor  # int64 [B, R]: the query's position; padding -1
    live: torch.Tensor  # int64 [n]: of all [B * Hkv * R] rows the numbers of those that are no padding
    live_before: tuple[int, ...]  # [B + 1]: how many of these lie in blocks before each
    pages: tuple[torch.Tensor, ...]  # per rank r: int64 [number of blocks with an r-th page], a prefix of the blocks
    first_page: torch.Tensor  # int64 [B]: index within the sequence of the block's first page (windows skip pages)
    open_ranks: tuple[frozenset[int], ...]  # per BLOCKS blocks: ranks of which every row sees all positions


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """What one slice's attention does, made once per sweep and used by every layer of the same heads and window.
    ``order`` int64 [T * Hq]: for each token's each head the number of its result, counted in the order of blocks."""

    groups: tuple[BlockGroup, ...]
    order: torch.Tensor


def plan_attention(spans: Sequence[SpanRows], group: int, kv_heads: int, window: int | None) -> AttentionPlan:
    """Cut spans, which together are all of a slice's rows, into blocks of query rows. ``group``: query heads per KV
    head; ``window`` as in AttentionSpec."""
    by_rows: dict[int, list[_Block]] = {}
    for span in spans:
        total = span.count * group
        size = next((r for r in BLOCK_ROWS if r >= total), BLOCK_ROWS[-1])
        for begin in range(0, total, size):
            flat = range(begin, min(begin + size, total))
            rows = [span.row * group + i for i in flat]  # token * group + head within the group
            positions = [span.start + i // group for i in flat]
            low = 0 if window is None else max(0, positions[0] - window + 1) // PAGE
            pages = list(span.pages[low : positions[-1] // PAGE + 1])
            padding = size - len(rows)
            by_rows.setdefault(size, []).append((rows + [0] * padding, positions + [-1] * padding, pages, low))
    groups = tuple(_block_group(blocks, group, kv_heads, window) for _, blocks in sorted(by_rows.items()))
    targets = torch.cat([blocks.queries.view(-1)[blocks.live] for blocks in groups])
    order = torch.empty_like(targets)
    order[targets] = torch.arange(len(targets))
    return AttentionPlan(groups, order)


def _block_group(blocks: list[_Block], group: int, kv_heads: int, window: int | None) -> BlockGroup:
    blocks.sort(key=lambda block: -len(block[2]))  # stable: ties keep their order
    ranks = []
    for rank in range(len(blocks[0][2])):
        ranks.append(torch.tensor([pages[rank] for _, _, pages, _ in blocks if len(pages) > rank]))
    rows = torch.tensor([block[0] for block in blocks]).unsqueeze(1)  # [B, 1, R]
    position = torch.tensor([block[1] for block in blocks])
    heads = torch.arange(kv_heads).unsqueeze(1) * group  # [Hkv, 1]: the first query head of each
    live = (position >= 0).unsqueeze(1).expand(-1, kv_heads, -1)
    return BlockGroup(
        queries=rows // group * (kv_heads * group) + heads + rows % group,
        position=position,
        live=live.reshape(-1).nonzero().view(-1),
        live_before=(0, *live.sum((1, 2)).cumsum(0).tolist()),
        pages=tuple(ranks),
        first_page=torch.tensor([block[3] for block in blocks]),
        open_ranks=tuple(
            _open_ranks(blocks[begin : begin + BLOCKS], window) for begin in range(0, len(blocks), BLOCKS)
        ),
    )


def _open_ranks(blocks: Sequence[_Block], window: int | None) -> frozenset[int]:
    """Ranks whose pages need no mask: within sight of the first and of the last query row of every block."""
    ranks = frozenset(range(max(len(block[2]) for block in blocks)))
    for _, positions, pages, low in blocks:
        seen = [position for position in positions if position >= 0]
        for rank in range(len(pages)):
            begin = (low + rank) * PAGE
            if begin + PAGE - 1 > seen[0] or (window is not None and begin <= seen[-1] - window):
                ranks -= {rank}
    return ranks


def paged_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    plan: AttentionPlan,
    *,
    scale: float,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
    scales: Scales | None = None,
    out: torch.Tensor,
) -> None:
    """softmax(scale * q k^T) v for every span of a slice, causal, within ``window``.

    ``query`` fp32 [T, Hq, D]; ``keys`` [P, Hkv, 64, D] and ``values`` [P, Hkv, 64, Dv] in the KV dtype; ``scales``:
    where that is int8, (of keys, of values) fp32 [P, Hkv, 64]; ``sinks`` fp32 [Hq] or None: a logit per head that joins
    the denominator only; ``out`` fp32 [T, Hq, Dv], contiguous. Query head h reads KV head h // (Hq / Hkv).
    """
    tokens, heads, depth = query.shape
    kv_heads, value_depth = keys.shape[1], values.shape[3]
    flat = query.reshape(tokens * heads, depth)
    results = temporary("attended", (tokens * heads, value_depth), query)  # in the order of blocks
    at = 0
    for blocks in plan.groups:
        count, size = blocks.position.shape
        step = blocks_at_once(size, kv_heads, max(depth, value_depth))
        for begin in range(0, count, step):
            part = slice(begin, min(begin + step, count))
            merged = _attend(flat, keys, values, blocks, part, scale, window, sinks, scales)  # [b, Hkv, R, Dv]
            first, last = blocks.live_before[part.start], blocks.live_before[part.stop]
            mine = results[at : at + last - first]
            at += last - first
            rows = merged.view(-1, value_depth)
            if len(rows) == len(mine):
                mine.copy_(rows)
            else:
                torch.index_select(rows, 0, blocks.live[first:last] - begin * kv_heads * size, out=mine)
    torch.index_select(results, 0, plan.order, out=out.view(tokens * heads, value_depth))


def _attend(
    flat: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    blocks: BlockGroup,
    part: slice,
    scale: float,
    window: int | None,
    sinks: torch.Tensor | None,
    scales: Scales | None,
) -> torch.Tensor:
    """The blocks ``part``, whole BLOCKS but for the end: every page of theirs, merged in page order; returns
    [b, Hkv, R, Dv]."""
    index = blocks.queries[part]  # [b, Hkv, R]
    count, kv_heads, size = index.shape
    depth, value_depth = keys.shape[3], values.shape[3]
    q = temporary("queries", (count * kv_heads, size, depth), flat)  # [b * Hkv, R, D]
    torch.index_select(flat, 0, index.view(-1), out=q.view(-1, depth))
    q.mul_(scale)
    position = blocks.position[part, :, None]  # [b, R, 1]
    first = blocks.first_page[part]
    open_ranks = frozenset.intersection(*blocks.open_ranks[part.start // BLOCKS : -(-part.stop // BLOCKS)])
    offsets = torch.arange(PAGE)
    for rank, pages in enumerate(blocks.pages):
        pages = pages[part]
        n = pages.shape[0]  # blocks with a page of this rank: a prefix
        if n == 0:
            break
        k = _gathered(keys, pages)
        scores = _products("scores", q[: n * kv_heads], k.transpose(1, 2)).view(n, kv_heads, size, PAGE)
        if scales is not None:  # of int8 positions, as kernels/attention/paged.py applies them
            scores.mul_(scales[0].index_select(0, pages).unsqueeze(2))
        hidden = None
        if rank not in open_ranks:
            key_position = ((first[:n] + rank) * PAGE)[:, None, None] + offsets  # [n, 1, 64]
            hidden = key_position > position[:n]
            if window is not None:
                hidden |= key_position <= position[:n] - window
            hidden = hidden.unsqueeze(1)
            scores.masked_fill_(hidden, MASKED)
        peak = scores.amax(-1, keepdim=True)
        scores.sub_(peak).clamp_(min=LEAST).exp_()
        if hidden is not None:
            scores.masked_fill_(hidden, 0.0)
        v = _gathered(values, pages)
        sums = scores.sum(-1, keepdim=True)
        if scales is not None:
            scores.mul_(scales[1].index_select(0, pages).unsqueeze(2))
        # The first page's results are merged into: they need a place of their own.
        partial = _products("partial" if rank else "weighted", scores.view(n * kv_heads, size, PAGE), v)
        partial = partial.view(n, kv_heads, size, value_depth)
        if rank == 0:  # every block has a first page: there is nothing to merge with yet
            maximum, total, weighted = peak, sums, partial
            continue
        highest = torch.maximum(maximum[:n], peak)
        keep, take = (maximum[:n] - highest).exp_(), peak.sub_(highest).exp_()
        total[:n].mul_(keep).add_(sums.mul_(take))
        weighted[:n].mul_(keep).add_(partial.mul_(take))
        maximum[:n] = highest
    if sinks is not None:
        logits = sinks[index % sinks.shape[0]].unsqueeze(-1)  # [b, Hkv, R, 1]
        highest = torch.maximum(maximum, logits)
        keep = (maximum - highest).exp_()
        total.mul_(keep).add_((logits - highest).exp_())
        weighted.mul_(keep)
    return weighted.div_(total)


def _products(slot: str, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """``left`` [n, R, K] times ``right`` [n, K, N]: [n, R, N], the temporary ``slot``.

    A single product MKL shares out among its threads in pieces of columns, and with 20 to 72 columns their bits depend
    on the pieces. Of several products each is done by one thread; so one is done twice."""
    count = left.shape[0]
    if count == 1:
        left, right = left.expand(2, -1, -1), right.expand(2, -1, -1)
    out = temporary(slot, (left.shape[0], left.shape[1], right.shape[2]), left)
    return torch.bmm(left, right, out=out)[:count]


def _gathered(cache: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
    """``pages`` int64 [n] of ``cache`` [P, Hkv, 64, D] in fp32: [n * Hkv, 64, D], valid until the next call."""
    heads, depth = cache.shape[1], cache.shape[3]
    shape = (pages.shape[0], heads, PAGE, depth)
    wide = temporary("pages", shape, cache, torch.float32)
    if cache.dtype == torch.float32 and cache.is_contiguous():
        return torch.index_select(cache, 0, pages, out=wide).view(-1, PAGE, depth)
    narrow = torch.index_select(cache, 0, pages, out=temporary("narrow pages", shape, cache))
    return wide.copy_(narrow).view(-1, PAGE, depth)
