"""What the planner has to know of a model, taken from its description: bytes, widths of activations, work."""

from __future__ import annotations

from math import prod

import torch

from batchgen_lite.kernels.experts.reference import most_stage_rows, stage_columns, stage_elements, stage_spans
from batchgen_lite.kernels.padding import SPAN_ROWS
from batchgen_lite.kernels.products import EXPERT_PADDING, KERNEL_BYTES, USES_ONEDNN
from batchgen_lite.models.load import LoadedModel
from batchgen_lite.models.modules import modules_of
from batchgen_lite.models.spec import AttentionSpec, ModelSpec
from batchgen_lite.models.weights import ModelWeights
from batchgen_lite.offload.device_tier import device_footprint
from batchgen_lite.offload.kv import KVShape, kv_dtype_of, pool_bytes
from batchgen_lite.offload.kv_shapes import kv_shapes
from batchgen_lite.offload.pages import PAGE_TOKENS
from batchgen_lite.offload.readers.placement import place
from batchgen_lite.offload.residents import tile_footprint
from batchgen_lite.offload.tiles import SHARED_EXPERT, Module, Tile
from batchgen_lite.runtime.activations import FLOAT, ActivationShape
from batchgen_lite.runtime.expert_columns import expert_columns
from batchgen_lite.runtime.expert_workers import workers_for
from batchgen_lite.runtime.placement import ALIGNMENT as VECTOR_ALIGNMENT
from batchgen_lite.runtime.planner import DeviceSize, ModelSize
from batchgen_lite.runtime.rates import OTHER_WIDENING, WIDENING, ModelWork
from batchgen_lite.runtime.widened_tiles import widened_bytes

DIRECT_ALIGNMENT = 4096  # bytes; what nearly every disk asks of direct reads


def described_size(
    model: LoadedModel, alignment: int = DIRECT_ALIGNMENT, *, kv_dtype: str = "auto", threads: int = 1
) -> ModelSize:
    """The size of a model that is only described, as the CPU computes with it on ``threads`` threads: no weight is
    read, its vectors are counted from their shapes."""
    vectors = sum(prod(tensor.shape) for tensor in model.checkpoint.tensors.values() if len(tensor.shape) == 1)
    modules = modules_of(model.spec, model.weights)
    workers = workers_for(modules, threads)
    return model_size(model.spec, model.weights, modules, alignment, FLOAT * vectors, kv_dtype, workers)


def model_size(
    spec: ModelSpec,
    weights: ModelWeights,
    modules: tuple[Module, ...],
    alignment: int,
    skeleton: int,
    kv_dtype: str = "auto",
    workers: int = 1,
) -> ModelSize:
    """Bytes of a model as it will lie in memory, read with ``alignment``; ``skeleton``: its vectors; ``kv_dtype`` as
    EngineOptions has it; ``workers``: as ActivationShape has it."""
    footprints = [tile_footprint(tile, alignment) for module in modules for tile in module.tiles]
    embedding = weights.embedding
    dtype = kv_dtype_of(kv_dtype, spec.dtype)
    return ModelSize(
        tiles=sum(footprints),
        largest_load=max(footprints),
        embedding=place(embedding.extents(0, embedding.rows), 0, alignment).end,
        page=pool_bytes(kv_shapes(spec), 1, dtype),
        int8_page=pool_bytes(kv_shapes(spec), 1, torch.int8),
        layer_page=max(shape.page_bytes(dtype) for shape in kv_shapes(spec)),
        activations=activation_shape(spec, modules, dtype.itemsize, workers),
        skeleton=skeleton,
        widened=widened_bytes(tile for module in modules for tile in module.tiles),
        work=model_work(spec, modules, alignment),
        device=DeviceSize(
            tiles=sum(device_footprint(tile) for module in modules for tile in module.tiles),
            largest_tile=max(device_footprint(tile) for module in modules for tile in module.tiles),
            skeleton=skeleton + VECTOR_ALIGNMENT * _vectors(spec),
        ),
    )


def _vectors(spec: ModelSpec) -> int:
    """At most so many vectors has a skeleton: each is rounded up where a device has memory of its own."""
    experts = sum(layer.router.num_experts for layer in spec.layers if layer.router is not None)
    return 16 * (spec.num_layers + 1) + 2 * experts


def activation_shape(
    spec: ModelSpec, modules: tuple[Module, ...], kv_itemsize: int, workers: int = 1
) -> ActivationShape:
    """Widths of all activations, the widest layer counting."""
    tiles = [tile for module in modules for tile in module.tiles]
    attentions = [layer.attention for layer in spec.layers]
    # Also by how many threads compute it: another number is another kernel.
    products = {
        (
            (stop - start) * tile.matrix.outputs_per_row,
            tile.matrix.cols if tile.expert == SHARED_EXPERT else stage_columns(tile.matrix),
            alone,
        )
        for tile in tiles
        for start, stop in stage_spans(tile.matrix, (tile.start, tile.stop))
        for alone in ((True, False) if workers > 1 and tile.expert != SHARED_EXPERT else (True,))
    }
    columns = [expert_columns(module) for module in modules if module.routed]
    ffns = [ffn for layer in spec.layers for ffn in (layer.dense, layer.expert, layer.shared) if ffn is not None]
    return ActivationShape(
        hidden=spec.hidden_size,
        projections=max(_projections(attention) for attention in attentions),
        attended=max(attention.num_heads * attention.v_head_dim for attention in attentions),
        intermediate=max(ffn.intermediate for ffn in ffns),
        experts=max((layer.router.num_experts for layer in spec.layers if layer.router), default=0),
        vocab=spec.vocab_size,
        ffn_stage=sum(
            max(most_stage_rows(tile.matrix) for tile in tiles if tile.role == role) for role in ("gate_up", "down")
        ),
        scratch=max(stage_elements(tile.matrix) for tile in tiles),
        product=max(rows + cols for rows, cols, _ in products),
        product_bytes=KERNEL_BYTES * len(products) * (SPAN_ROWS // EXPERT_PADDING) if USES_ONEDNN else 0,
        kv_heads=max(shape.heads for shape in kv_shapes(spec)),
        head_dim=max(max(shape.key_dim, shape.value_dim) for shape in kv_shapes(spec)),
        kv_itemsize=kv_itemsize,
        rope_channels=sum(rope.dim for rope in {attention.rope for attention in attentions} if rope is not None),
        plan_groups=tuple(group for group, _ in {(_group(a), a.window) for a in attentions}),
        workers=workers,
        gathered=max((each.gate_up for each in columns), default=0),
        gathered_intermediate=max((each.down for each in columns), default=0),
    )


def _group(attention: AttentionSpec) -> int:
    """Query heads that share a KV head; a latent is one head to all."""
    return attention.num_heads if attention.is_mla else attention.num_heads // attention.num_kv_heads


def _projections(attention: AttentionSpec) -> int:
    if attention.is_mla:
        assert attention.kv_lora_rank is not None
        assert attention.rope_head_dim is not None
        # Each as its module gives it and as the next one takes it: query, its latent, what is absorbed.
        latents = 2 * (attention.q_lora_rank or 0) + attention.kv_lora_rank + attention.rope_head_dim
        absorbed = attention.num_heads * (2 * attention.kv_lora_rank + attention.v_head_dim)
        return 2 * attention.num_heads * attention.head_dim + latents + absorbed
    return attention.num_heads * attention.head_dim + attention.num_kv_heads * (
        attention.head_dim + attention.v_head_dim
    )


def model_work(spec: ModelSpec, modules: tuple[Module, ...], alignment: int) -> ModelWork:
    """Bytes, FLOP and widening of all tiles, by what a sweep needs them for. A product with n weights is 2 n FLOP."""
    nbytes = {"dense": 0, "routed": 0, "head": 0}
    elements = dict.fromkeys(nbytes, 0)
    widening = dict.fromkeys(nbytes, 0.0)
    for module in modules:
        for tile in module.tiles:
            kind = "head" if module.kind == "head" else "routed" if tile.expert != SHARED_EXPERT else "dense"
            nbytes[kind] += tile_footprint(tile, alignment)
            elements[kind] += _elements(tile)
            widening[kind] += _widening(tile)
    routers = [layer.router for layer in spec.layers if layer.router is not None]
    experts = max((router.num_experts for router in routers), default=0)
    shapes = kv_shapes(spec)
    return ModelWork(
        dense_bytes=nbytes["dense"] + nbytes["head"],
        routed_bytes=nbytes["routed"],
        dense_flops=2.0 * elements["dense"],
        expert_flops=2.0 * elements["routed"] / experts if experts else 0.0,
        head_flops=2.0 * elements["head"],
        visit_flops=sum(
            2.0 * PAGE_TOKENS * shape.heads * (shape.key_dim + (shape.value_dim or shape.key_dim)) for shape in shapes
        ),
        dense_widening=widening["dense"],
        routed_widening=widening["routed"],
        head_widening=widening["head"],
        experts=experts,
        top_k=max((router.top_k for router in routers), default=0),
        group=max(layer.attention.num_heads // shape.heads for layer, shape in zip(spec.layers, shapes, strict=True)),
    )


def _attended_channels(shape: KVShape) -> int:
    """Channels of scores and of values; a latent cache serves as both."""
    return shape.key_dim + (shape.value_dim or shape.key_dim)


def _elements(tile: Tile) -> int:
    return (tile.stop - tile.start) * tile.matrix.outputs_per_row * tile.matrix.cols


def _widening(tile: Tile) -> float:
    """Seconds of one core; plain fp32 is used where it lies, except that pairs are put together."""
    encoding = tile.matrix.encoding
    if encoding == "F32" and tile.matrix.outputs_per_row == 1:
        return 0.0
    slowest = min(WIDENING.get(part, OTHER_WIDENING) for part in encoding.split("+"))
    return _elements(tile) / slowest
