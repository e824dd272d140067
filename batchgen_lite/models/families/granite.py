"""Granite-MoE: softmax over the chosen experts, and constant factors on embeddings, residuals, scores and logits."""

from __future__ import annotations

from dataclasses import replace

from batchgen_lite.models.config_keys import Config
from batchgen_lite.models.families.common import Family, Scales, activation, attention, ffn, num_layers, router
from batchgen_lite.models.spec import FFNSpec, LayerSpec


def _granite(config: Config, family: Family) -> tuple[LayerSpec, ...]:
    bias = config.flag("attention_bias", default=False)
    layer = LayerSpec(
        attention=attention(
            config,
            family,
            scale=config.number("attention_multiplier", default=1.0),
            qkv_bias=bias,
            out_bias=bias,
        ),
        router=router(config, scoring="softmax_topk"),
        expert=ffn(config, "intermediate_size"),
    )
    return (layer,) * num_layers(config)


def _granite_shared(config: Config, family: Family) -> tuple[LayerSpec, ...]:
    layers = _granite(config, family)
    width = config.integer("shared_intermediate_size", default=0, minimum=0)
    if width == 0:
        return layers
    shared = FFNSpec(intermediate=width, activation=activation(config))
    return tuple(replace(layer, shared=shared) for layer in layers)


def _scales(config: Config) -> Scales:
    return Scales(
        embedding=config.number("embedding_multiplier", default=1.0),
        residual=config.number("residual_multiplier", default=1.0),
        logit=1.0 / config.number("logits_scaling", default=1.0),
    )


GRANITE_MOE = Family("granitemoe", ("GraniteMoeForCausalLM",), "granitemoe", _granite, scales=_scales)
GRANITE_MOE_SHARED = Family(
    "granitemoeshared", ("GraniteMoeSharedForCausalLM",), "granitemoeshared", _granite_shared, scales=_scales
)
