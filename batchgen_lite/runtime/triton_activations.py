"""How much memory a sweep takes on a card that runs the Triton kernels: torch-free, as activations.py, whose place it
takes in the planner. It follows runtime/triton_operations.py step by step; tests compare the two.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from batchgen_lite.kernels.padding import padded
from batchgen_lite.models.spec import AttentionSpec, LayerSpec, ModelSpec
from batchgen_lite.offload.pages import PAGE_TOKENS
from batchgen_lite.runtime.activations import FLOAT, ActivationShape

PARTIAL_ELEMENTS = 1 << 24  # fp32 of partial attention results at a time: 64 MiB
FEWEST_ROWS = 16  # that attend together, whatever they take
SPLIT_PAGES = 8  # of one partial result, the fewest that any rule of kernels/config.json has
TAKES = 24  # tensors alive at once at most, each rounded up to a cache line


def rows_at_once(partial: int, splits: int) -> int:
    """Rows that attend together: ``partial`` fp32 elements each and split, of which the longest row has ``splits``."""
    return max(FEWEST_ROWS, PARTIAL_ELEMENTS // (partial * max(1, splits)))


@dataclass(frozen=True, slots=True)
class TritonActivations(ActivationShape):
    """``size``: bytes of an activation. Bytes per token, the widest layer counting: ``projected``, what attention's
    half of a layer takes beside its fp32 result; ``staged``, keys and values on their way to int8; ``networks``, what
    the other half takes beside its. ``partials``: fp32 elements of a row's partial attention result."""

    size: int = 2
    projected: int = 0
    staged: int = 0
    partials: int = 1
    networks: int = 0

    def workspace_bytes(self, tokens: int, logit_rows: int) -> int:
        """See ActivationShape.workspace_bytes; partial results of attention are in ``index_bytes``."""
        rows = padded(tokens)
        scratch = self.scratch * (FLOAT if self.size == FLOAT else FLOAT + self.size)
        common = rows * self.hidden * (self.size + FLOAT)
        staged = (tokens + PAGE_TOKENS) * self.staged
        half = rows * (FLOAT * self.hidden + max(self.projected, self.networks)) + staged
        head = padded(logit_rows) * (self.hidden * self.size + self.vocab * FLOAT)
        return scratch + max(common + half, head) + TAKES * 64

    def transient_bytes(self, slice_tokens: int) -> int:
        """Of the host: nothing is computed there."""
        return 0

    def index_bytes(self, tokens: int, sequences: int, longest_pages: int, kv_pages: int) -> int:
        """Partial results of attention. The kernels' tables are small, and the device keeps room for them."""
        splits = -(-max(1, longest_pages) // SPLIT_PAGES)
        return FLOAT * splits * self.partials * min(padded(tokens), rows_at_once(self.partials, splits))


def triton_activations(shape: ActivationShape, spec: ModelSpec, size: int, kv_size: int) -> TritonActivations:
    """``shape`` with what a card adds. ``size``: bytes of an activation, ``kv_size``: of a KV channel."""
    attentions = [layer.attention for layer in spec.layers]
    query = size if kv_size == 1 else kv_size
    return TritonActivations(
        **{field.name: getattr(shape, field.name) for field in fields(shape)},
        size=size,
        projected=max(_projected(attention, size, query) for attention in attentions),
        staged=max(_cached(attention) for attention in attentions) * size if kv_size == 1 else 0,
        partials=max(attention.num_heads * (_summed(attention) + 2) for attention in attentions),
        networks=max(_networks(layer, spec.hidden_size, size) for layer in spec.layers),
    )


def _cached(attention: AttentionSpec) -> int:
    """Channels that a position caches."""
    if attention.is_mla:
        return (attention.kv_lora_rank or 0) + (attention.rope_head_dim or 0)
    return attention.num_kv_heads * (attention.head_dim + attention.v_head_dim)


def _summed(attention: AttentionSpec) -> int:
    """Channels that attention adds up per head."""
    return attention.kv_lora_rank or attention.v_head_dim


def _projected(attention: AttentionSpec, size: int, query: int) -> int:
    """Bytes per token of projections, queries (``query`` bytes a channel), and attention's result."""
    heads = attention.num_heads
    if not attention.is_mla:
        projections = heads * attention.head_dim + _cached(attention)
        return size * (projections + heads * attention.v_head_dim) + query * heads * attention.head_dim
    rank, rope = attention.kv_lora_rank or 0, attention.rope_head_dim or 0
    projections = heads * attention.head_dim + 2 * (attention.q_lora_rank or 0) + rank + rope
    absorbed = heads * (2 * rank + rope + attention.v_head_dim)
    # Queries are copied once more where the cache has another type than activations.
    return size * (projections + absorbed) + query * heads * (rope + rank + rope)


def _networks(layer: LayerSpec, hidden: int, size: int) -> int:
    """Bytes per token of a layer's feed-forward networks and their routing."""
    taken = 0
    if layer.dense is not None:
        taken += size * layer.dense.intermediate
    if layer.router is not None and layer.expert is not None:
        chosen = layer.router.top_k
        taken += FLOAT * layer.router.num_experts + 2 * FLOAT * chosen
        taken += size * chosen * (layer.expert.intermediate + hidden)
    if layer.shared is not None:
        taken += size * layer.shared.intermediate + FLOAT * (hidden + 1)
    return taken
