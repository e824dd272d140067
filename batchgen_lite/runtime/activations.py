"""How much memory a sweep's activations take: the arithmetic behind the workspace, torch-free.

It follows what runtime/cpu_operations.py and its modules take from the workspace step by step; tests compare the two.
"""

from __future__ import annotations

from dataclasses import dataclass

from batchgen_lite.offload.pages import PAGE_TOKENS
from batchgen_lite.runtime.padding import padded

FLOAT = 4
TAKES = 16  # tensors alive at once at most, each rounded up to a cache line
PAGES_AT_ONCE = 64  # of attention, as in kernels/attention/reference.py
BLOCK_ROWS = 64


@dataclass(frozen=True, slots=True)
class ActivationShape:
    """Floats per token of each activation, the widest layer counting. ``ffn_stage``: rows of a gate/up stage (gate
    plus up); ``head_stage``: rows of a stage of the head; ``scratch``: floats of the widest stage of weights."""

    hidden: int
    projections: int
    attended: int
    intermediate: int
    experts: int
    vocab: int
    ffn_stage: int
    head_stage: int
    scratch: int
    kv_heads: int
    head_dim: int
    kv_itemsize: int

    def workspace_bytes(self, tokens: int, logit_rows: int) -> int:
        """Bytes for a sweep of ``tokens`` tokens of which ``logit_rows`` want logits."""
        rows = padded(tokens)
        common = rows * 2 * self.hidden
        attention = rows * (self.projections + self.attended + self.hidden)
        # router, delta, then one expert: gathered rows, activated, result, weighted result, a gate/up stage
        ffn = rows * (self.experts + 4 * self.hidden + self.intermediate + self.ffn_stage)
        head_rows = padded(logit_rows)
        head = head_rows * (self.hidden + self.vocab + self.head_stage)
        floats = self.scratch + max(common + max(attention, ffn), head)
        return FLOAT * floats + TAKES * 64

    def transient_bytes(self, slice_tokens: int) -> int:
        """Bytes that torch allocates and frees within one slice's attention: copies of its projections, and one
        batch of pages with its scores and partial results."""
        copies = 2 * slice_tokens * (self.projections + self.attended)
        pages = PAGES_AT_ONCE * self.kv_heads * PAGE_TOKENS * self.head_dim * (1 + self.kv_itemsize / FLOAT)
        blocks = PAGES_AT_ONCE * self.kv_heads * BLOCK_ROWS * (2 * PAGE_TOKENS + 5 * self.head_dim)
        return int(FLOAT * (copies + pages + blocks))
