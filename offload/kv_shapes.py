"""What each layer of a model caches per position."""

from __future__ import annotations

from batchgen_lite.models.spec import ModelSpec
from batchgen_lite.offload.kv import KVShape


def kv_shapes(spec: ModelSpec) -> list[KVShape]:
    """One shape a layer. MLA caches its latent and the shared rotary key as one head whose value is a part of it."""
    shapes = []
    for layer in spec.layers:
        attention = layer.attention
        if attention.is_mla:
            assert attention.kv_lora_rank is not None
            assert attention.rope_head_dim is not None
            shapes.append(KVShape(1, attention.kv_lora_rank + attention.rope_head_dim, 0))
        else:
            shapes.append(KVShape(attention.num_kv_heads, attention.head_dim, attention.v_head_dim))
    return shapes
