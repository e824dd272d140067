"""Plain softmax-routed MoE families: Mixtral, OLMoE, Qwen2-MoE, Qwen3-MoE."""

from __future__ import annotations

from batchgen_lite.models.config_keys import Config
from batchgen_lite.models.families.common import (
    Family,
    attention,
    ffn,
    num_layers,
    router,
    sparse_layers,
    uniform_window,
    windows,
)
from batchgen_lite.models.spec import LayerSpec


def _mixtral(config: Config, family: Family) -> tuple[LayerSpec, ...]:
    window = uniform_window(config, config.optional_integer("sliding_window"))
    layer = LayerSpec(
        attention=attention(config, family, window=window),
        router=router(config, renormalise=True),
        expert=ffn(config, "intermediate_size"),
    )
    return (layer,) * num_layers(config)


def _olmoe(config: Config, family: Family) -> tuple[LayerSpec, ...]:
    config.refuse_unless("clip_qkv", None)
    bias = config.flag("attention_bias", default=False)
    layer = LayerSpec(
        attention=attention(config, family, qk_norm="full", qkv_bias=bias, out_bias=bias),
        router=router(config, renormalise=config.flag("norm_topk_prob", default=False)),
        expert=ffn(config, "intermediate_size"),
    )
    return (layer,) * num_layers(config)


def _qwen2_moe(config: Config, family: Family) -> tuple[LayerSpec, ...]:
    window = None
    if config.flag("use_sliding_window", default=False):
        window = config.integer("sliding_window", default=4096)
    # Unlike dense Qwen2: every other layer below max_window_layers slides.
    first = config.integer("max_window_layers", default=28, minimum=0)
    sliding = [layer % 2 == 0 and layer < first for layer in range(num_layers(config))]
    bias = config.flag("qkv_bias", default=True)
    attentions = [attention(config, family, window=w, qkv_bias=bias) for w in windows(config, window, sliding)]
    return tuple(
        LayerSpec(
            attention=part,
            router=router(config, renormalise=config.flag("norm_topk_prob", default=False)),
            expert=ffn(config, "moe_intermediate_size"),
            shared=ffn(config, "shared_expert_intermediate_size"),
            shared_gated=True,
        )
        if sparse
        else LayerSpec(attention=part, dense=ffn(config, "intermediate_size"))
        for part, sparse in zip(attentions, sparse_layers(config), strict=True)
    )


def _qwen3_moe(config: Config, family: Family) -> tuple[LayerSpec, ...]:
    window = None
    if config.flag("use_sliding_window", default=False):
        window = config.integer("sliding_window", default=4096)
    bias = config.flag("attention_bias", default=False)
    part = attention(
        config, family, qk_norm="head", window=uniform_window(config, window), qkv_bias=bias, out_bias=bias
    )
    return tuple(
        LayerSpec(
            attention=part,
            router=router(config, renormalise=config.flag("norm_topk_prob", default=False)),
            expert=ffn(config, "moe_intermediate_size"),
        )
        if sparse
        else LayerSpec(attention=part, dense=ffn(config, "intermediate_size"))
        for sparse in sparse_layers(config)
    )


MIXTRAL = Family("mixtral", ("MixtralForCausalLM",), "mixtral", _mixtral, default_theta=1e6, default_norm_eps=1e-5)
OLMOE = Family("olmoe", ("OlmoeForCausalLM",), "olmoe", _olmoe, default_norm_eps=1e-5)
QWEN2_MOE = Family("qwen2_moe", ("Qwen2MoeForCausalLM",), "qwen2_moe", _qwen2_moe)
QWEN3_MOE = Family("qwen3_moe", ("Qwen3MoeForCausalLM",), "qwen3_moe", _qwen3_moe)
