"""GLM-4.5 and its successors with the same layers (Glm4MoeForCausalLM): partial rotary, DeepSeek-V3's router."""

from __future__ import annotations

from batchgen_lite.models.config_keys import Config
from batchgen_lite.models.families.common import Family, attention, dense_first, ffn, shared_experts
from batchgen_lite.models.families.deepseek import sigmoid_router
from batchgen_lite.models.spec import LayerSpec


def _glm4_moe(config: Config, family: Family) -> tuple[LayerSpec, ...]:
    config.refuse_unless("scoring_func", "sigmoid")
    config.refuse_unless("topk_method", "noaux_tc")
    part = attention(
        config,
        family,
        qk_norm="head" if config.flag("use_qk_norm", default=False) else None,
        qkv_bias=config.flag("attention_bias", default=False),  # the output projection never has one
    )
    moe = LayerSpec(
        attention=part,
        router=sigmoid_router(config, scaling=1.0, groups=(1, 1)),
        expert=ffn(config, "moe_intermediate_size"),
        shared=shared_experts(config),
    )
    dense = LayerSpec(attention=part, dense=ffn(config, "intermediate_size"))
    return tuple(moe if sparse else dense for sparse in dense_first(config, default=1))


GLM4_MOE = Family(
    "glm4_moe",
    ("Glm4MoeForCausalLM",),
    "glm4_moe",
    _glm4_moe,
    default_norm_eps=1e-5,
    default_partial_rotary=0.5,
)
