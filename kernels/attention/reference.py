"""Attention over KV pages in torch: the CPU's production path.

Exactness decides the shape of this file. A token's output must not depend on the batch, on how its prompt was cut
into spans, or on pages behind it. So the unit of arithmetic is fixed: one *block* of query rows of one sequence
against one page of 64 positions, a GEMM whose inner dimensions never vary; partial results of a block (maximum, sum,
weighted values) are merged strictly in page order, as in Flash-Decoding (Dao et al. 2023). Pages that a row may not
see contribute exact zeros. MKL gives a row the same bits for any number of rows per block and any number of blocks
(tests/kernels/test_attention_blocking.py), so short spans use small blocks.

Blocks are sorted by their number of pages, longest first. Then the blocks that have an r-th page are a prefix,
queries and running results are contiguous slices, and only the pages themselves are gathered.
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
    """All blocks of one row count. B blocks of R rows; a row is (token, query head within the KV head's group)."""

    rows: torch.Tensor  # int64 [B, R]: index into the slice's (token * group + head) rows; padding repeats row 0
    position: torch.Tensor  # int64 [B, R]: the query's position; padding -1
    pages: tuple[torch.Tensor, ...]  # per rank r: int64 [number of blocks with an r-th page], a prefix of the blocks
    first_page: torch.Tensor  # int64 [B]: index within the sequence of the block's first page (windows skip pages)
    open_ranks: tuple[frozenset[int], ...]  # per BLOCKS blocks: ranks of which every row sees all positions


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """What one slice's attention does, made once per sweep and used by every layer of the same window."""

    groups: tuple[BlockGroup, ...]


def plan_attention(spans: Sequence[SpanRows], group: int, window: int | None) -> AttentionPlan:
    """Cut spans into blocks of query rows. ``group``: query heads per KV head; ``window`` as in AttentionSpec."""
    by_rows: dict[int, list[_Block]] = {}
    for span in spans:
        total = span.count * group
        size = next((r for r in BLOCK_ROWS if r >= total), BLOCK_ROWS[-1])
        for begin in range(0, total, size):
            flat = range(begin, min(begin + size, total))
            rows = [span.row * group + i for i in flat]
            positions = [span.start + i // group for i in flat]
            low = 0 if window is None else max(0, positions[0] - window + 1) // PAGE
            pages = list(span.pages[low : positions[-1] // PAGE + 1])
            padding = size - len(rows)
            by_rows.setdefault(size, []).append((rows + [0] * padding, positions + [-1] * padding, pages, low))
    return AttentionPlan(tuple(_block_group(blocks, window) for _, blocks in sorted(by_rows.items())))


def _block_group(blocks: list[_Block], window: int | None) -> BlockGroup:
    blocks.sort(key=lambda block: -len(block[2]))  # stable: ties keep their order
    ranks = []
    for rank in range(len(blocks[0][2])):
        ranks.append(torch.tensor([pages[rank] for _, _, pages, _ in blocks if len(pages) > rank]))
    return BlockGroup(
        rows=torch.tensor([block[0] for block in blocks]),
        position=torch.tensor([block[1] for block in blocks]),
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
    the denominator only; ``out`` fp32 [T, Hq, Dv]. Query head h reads KV head h // (Hq / Hkv). Rows of ``out`` outside
    the plan's spans keep their contents.
    """
    tokens, heads, _ = query.shape
    kv_heads, group = keys.shape[1], heads // keys.shape[1]
    # [T, Hkv, G, D] -> [T * G, Hkv, D]: a row is a (token, head of the group), its KV heads side by side
    flat = query.reshape(tokens, kv_heads, group, -1).transpose(1, 2).reshape(tokens * group, kv_heads, -1)
    flat = flat * scale
    result = out.view(tokens, kv_heads, group, -1)
    for blocks in plan.groups:
        step = blocks_at_once(blocks.rows.shape[1], kv_heads, max(keys.shape[3], values.shape[3]))
        for begin in range(0, blocks.rows.shape[0], step):
            part = slice(begin, begin + step)
            merged = _attend(flat, keys, values, blocks, part, window, sinks, scales)  # [b, Hkv, R, Dv]
            live = blocks.position[part] >= 0  # [b, R]
            rows = blocks.rows[part][live]
            result[rows // group, :, rows % group] = merged.transpose(1, 2)[live]


def _attend(
    flat: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    blocks: BlockGroup,
    part: slice,
    window: int | None,
    sinks: torch.Tensor | None,
    scales: Scales | None,
) -> torch.Tensor:
    """The blocks ``part``, whole BLOCKS but for the end: every page of theirs, merged in page order; returns
    [b, Hkv, R, Dv]."""
    index = blocks.rows[part]  # [b, R]
    count, size = index.shape
    kv_heads, depth, value_depth = keys.shape[1], keys.shape[3], values.shape[3]
    q = flat[index].transpose(1, 2).reshape(count * kv_heads, size, depth)  # [b * Hkv, R, D]
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
        group = sinks.shape[0] // kv_heads
        logits = sinks.view(kv_heads, group).t()[index % group].transpose(1, 2).unsqueeze(-1)  # [b, Hkv, R, 1]
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
