"""How much memory a sweep's activations take: the arithmetic behind the workspace, torch-free.

It follows what runtime/cpu_operations.py and its modules take from the workspace step by step; tests compare the two.
"""

from __future__ import annotations

from dataclasses import dataclass

from batchgen_lite.kernels.attention.blocking import BLOCK_ROWS, BLOCKS, page_elements
from batchgen_lite.kernels.padding import SPAN_ROWS, column_stride, padded
from batchgen_lite.offload.pages import PAGE_TOKENS

FLOAT = 4
INDEX = 8
RESULTS = 2
"""Results that a worker of experts may have at a time: one that waits to be added, and the next."""
WORKER_TAKES = 256  # floats: tensors of a worker, each rounded up to a cache line
TAKES = 16  # tensors alive at once at most, each rounded up to a cache line


@dataclass(frozen=True, slots=True)
class ActivationShape:
    """Floats per token of each activation, the widest layer counting. ``ffn_stage``: rows of a gate/up stage and of a
    down stage; ``scratch``: floats of the widest stage of weights; ``product``: rows of the widest product's result and
    of its input; ``product_bytes``: what the library of products keeps; ``rope_channels``: rotated channels of all
    distinct rotary embeddings together; ``plan_groups``: query heads per KV head of each distinct kind of attention;
    ``workers``: experts that are computed side by side; ``gathered``: floats of a row as routed experts are given it,
    and ``gathered_intermediate`` of what they make of it in between, with what products want behind (0: no more than
    ``hidden`` and ``intermediate``)."""

    hidden: int
    projections: int
    attended: int
    intermediate: int
    experts: int
    vocab: int
    ffn_stage: int
    scratch: int
    product: int
    product_bytes: int
    kv_heads: int
    head_dim: int
    kv_itemsize: int
    rope_channels: int = 0
    plan_groups: tuple[int, ...] = ()
    workers: int = 1
    gathered: int = 0
    gathered_intermediate: int = 0

    def workspace_bytes(self, tokens: int, logit_rows: int) -> int:
        """Bytes for a sweep of ``tokens`` tokens of which ``logit_rows`` want logits."""
        rows = padded(tokens)
        columns = column_stride(rows)  # of what is read transposed
        common = rows * 2 * self.hidden
        attention = rows * self.attended + columns * (self.projections + self.hidden)
        # router and delta, then the rest of one expert: gathered rows, activated, and what the activation and adding
        # the result up need
        hidden = max(self.hidden, self.gathered)
        intermediate = max(self.intermediate, self.gathered_intermediate)
        expert = rows * (hidden + intermediate) + min(rows, SPAN_ROWS) * self.ffn_stage
        if self.workers > 1:  # they share what one expert may need, which is far more than most do
            few = worker_floats(min(rows, SPAN_ROWS), hidden, intermediate, self.ffn_stage)
            expert = max(expert, self.workers * few) + (self.workers - 1) * self.scratch + self.workers * WORKER_TAKES
        ffn = columns * (self.experts + self.hidden) + expert
        head = padded(logit_rows) * (self.hidden + self.vocab)
        floats = self.scratch + max(common + max(attention, ffn), head)
        return FLOAT * floats + TAKES * 64

    def transient_bytes(self, slice_tokens: int) -> int:
        """Bytes that torch allocates and frees: within one slice's attention copies of its projections, and one batch
        of pages with its scores and partial results; of a product its result and its input as oneDNN packs it. And what
        oneDNN keeps."""
        copies = 2 * slice_tokens * (self.projections + self.attended)
        pages = page_elements(self.kv_heads, self.head_dim) * (1 + self.kv_itemsize / FLOAT)
        blocks = BLOCKS * self.kv_heads * BLOCK_ROWS[-1] * (2 * PAGE_TOKENS + 5 * self.head_dim)
        products = self.workers * SPAN_ROWS * self.product
        return int(FLOAT * max(copies + pages + blocks, products)) + self.product_bytes

    def index_bytes(self, tokens: int, sequences: int, longest_pages: int, kv_pages: int) -> int:
        """Bytes of the tables that slices need on a device with memory of its own: int64 page, slot and logit row of
        every token, cosines and sines, and for every kind of attention the rows and pages of its blocks."""
        each = tokens * (3 * INDEX + FLOAT * self.rope_channels)
        blocks = 0
        for group in self.plan_groups:
            # A block's rows are padded to a power of two from 4 on.
            rows = tokens * max(4, 2 * group)
            pages = min(kv_pages, sequences * longest_pages) + tokens * group // BLOCK_ROWS[-1] * longest_pages
            first = sequences + rows // 4
            # Queries of blocks, those that are no padding, the order of results, and positions, once for all KV heads.
            blocks += INDEX * ((3 * self.kv_heads + 1) * rows + pages + first)
        tables = 8 + (3 + 5 * (4 + longest_pages)) * max(1, len(self.plan_groups))  # each rounded up to a cache line
        return each + blocks + tables * 64 * (1 + min(tokens, sequences))


def worker_floats(rows: int, hidden: int, intermediate: int, stage_rows: int) -> int:
    """What a worker needs beside its scratch for experts of ``rows`` rows: results in the place of gathered rows,
    activated, and what the activation needs."""
    return rows * (RESULTS * hidden + intermediate) + min(rows, SPAN_ROWS) * stage_rows
