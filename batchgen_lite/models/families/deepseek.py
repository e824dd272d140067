"""DeepSeek-V2 and V3 (R1, Kimi-K2, Moonlight), and GLM-4.7-Flash, which has the same layers: latent attention."""

from __future__ import annotations

from batchgen_lite.errors import CheckpointError, UnsupportedError
from batchgen_lite.models.config_keys import Config
from batchgen_lite.models.families.common import Family, dense_first, ffn, num_layers, router, shared_experts
from batchgen_lite.models.rope_config import rope_from_config, yarn_mscale
from batchgen_lite.models.spec import AttentionSpec, LayerSpec, RouterSpec


def _latent_attention(config: Config, family: Family, *, interleaved: bool) -> AttentionSpec:
    nope, rope_dim = config.integer("qk_nope_head_dim"), config.integer("qk_rope_head_dim")
    rope = rope_from_config(config, rope_dim, default_theta=family.default_theta, interleaved=interleaved)
    mscale = 1.0
    if rope.kind != "default" and rope.mscale_all_dim:
        mscale = yarn_mscale(rope.factor, rope.mscale_all_dim)
    heads = config.integer("num_attention_heads")
    bias = config.flag("attention_bias", default=False)
    return AttentionSpec(
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=nope + rope_dim,
        v_head_dim=config.integer("v_head_dim"),
        scale=float((nope + rope_dim) ** -0.5) * mscale * mscale,
        rope=rope,
        q_lora_rank=config.optional_integer("q_lora_rank"),
        kv_lora_rank=config.integer("kv_lora_rank"),
        rope_head_dim=rope_dim,
        latent_norm_eps=1e-6,  # these norms never take the model's rms_norm_eps
        qkv_bias=bias,
        out_bias=bias,
    )


def _layers(
    config: Config, attention: AttentionSpec, route: RouterSpec, sparse: tuple[bool, ...], *, bias: bool = False
) -> tuple[LayerSpec, ...]:
    """``bias``: dense FFNs and shared experts have biases (V2's mlp_bias); routed experts never do."""
    moe = LayerSpec(
        attention=attention,
        router=route,
        expert=ffn(config, "moe_intermediate_size"),
        shared=shared_experts(config, bias=bias),
    )
    dense = LayerSpec(attention=attention, dense=ffn(config, "intermediate_size", bias=bias))
    return tuple(moe if is_sparse else dense for is_sparse in sparse)


def _groups(config: Config, route: RouterSpec) -> RouterSpec:
    """Refuse group counts that do not divide the experts or leave fewer than top-k of them."""
    if route.num_experts % route.num_groups or not 1 <= route.topk_group <= route.num_groups:
        raise CheckpointError(
            f"{config.source}: {route.num_experts} experts cannot form n_group = {route.num_groups} groups with "
            f"topk_group = {route.topk_group} open."
        )
    size = route.num_experts // route.num_groups
    if size * route.topk_group < route.top_k or (route.group_score == "top2" and size < 2):
        raise CheckpointError(
            f"{config.source}: groups of {size} experts, {route.topk_group} open, cannot give {route.top_k} experts."
        )
    return route


def _deepseek_v2(config: Config, family: Family) -> tuple[LayerSpec, ...]:
    config.refuse_unless("scoring_func", "softmax")
    config.refuse_unless("moe_layer_freq", 1)
    # DeepSeek's own code and transformers differ on what it would mean here; no published V2 model sets it.
    config.refuse_unless("norm_topk_prob", None, False)
    method = config.text("topk_method", default="greedy")
    groups: dict[str, int] = {}
    if method == "group_limited_greedy":
        groups = {"num_groups": config.integer("n_group"), "topk_group": config.integer("topk_group")}
    elif method != "greedy":
        raise UnsupportedError(
            f"{config.source}: topk_method {method!r} is not implemented for DeepSeek-V2; only greedy and "
            "group_limited_greedy are."
        )
    scaling = config.number("routed_scaling_factor", default=1.0)
    route = _groups(config, router(config, scaling=scaling, **groups))
    return _layers(
        config,
        _latent_attention(config, family, interleaved=True),
        route,
        dense_first(config, default=0),
        bias=config.flag("mlp_bias", default=False),
    )


def sigmoid_router(config: Config, *, scaling: float, groups: tuple[int, int]) -> RouterSpec:
    """The router of DeepSeek-V3 and its kin; the last two are transformers' defaults."""
    return _groups(
        config,
        router(
            config,
            scoring="sigmoid",
            renormalise=config.flag("norm_topk_prob", default=True),
            scaling=config.number("routed_scaling_factor", default=scaling),
            num_groups=config.integer("n_group", default=groups[0]),
            topk_group=config.integer("topk_group", default=groups[1]),
            group_score="top2",
            correction_bias=True,
        ),
    )


def _deepseek_v3(config: Config, family: Family) -> tuple[LayerSpec, ...]:
    config.refuse_unless("scoring_func", "sigmoid")
    config.refuse_unless("topk_method", "noaux_tc")
    config.refuse_unless("moe_layer_freq", 1)
    interleaved = config.flag("rope_interleave", default=True)
    route = sigmoid_router(config, scaling=2.5, groups=(8, 4))
    attention = _latent_attention(config, family, interleaved=interleaved)
    return _layers(config, attention, route, dense_first(config, default=3))


def _glm4_moe_lite(config: Config, family: Family) -> tuple[LayerSpec, ...]:
    config.refuse_unless("scoring_func", "sigmoid")
    config.refuse_unless("topk_method", "noaux_tc")
    interleaved = config.flag("rope_interleave", default=True)
    route = sigmoid_router(config, scaling=1.8, groups=(1, 1))
    kinds = config.strings("mlp_layer_types", length=num_layers(config))
    if kinds is None:
        config.refuse_unless("first_k_dense_replace", None, 1)  # transformers does not read it here
        sparse = tuple(layer > 0 for layer in range(num_layers(config)))
    elif set(kinds) <= {"dense", "sparse"}:
        sparse = tuple(kind == "sparse" for kind in kinds)
    else:
        raise UnsupportedError(f"{config.source}: mlp_layer_types holds {set(kinds)}; only dense and sparse are known.")
    return _layers(config, _latent_attention(config, family, interleaved=interleaved), route, sparse)


DEEPSEEK_V2 = Family("deepseek_v2", ("DeepseekV2ForCausalLM",), "deepseek_v2", _deepseek_v2)
DEEPSEEK_V3 = Family("deepseek_v3", ("DeepseekV3ForCausalLM",), "deepseek_v3", _deepseek_v3)
GLM4_MOE_LITE = Family(
    "glm4_moe_lite", ("Glm4MoeLiteForCausalLM",), "glm4_moe_lite", _glm4_moe_lite, default_norm_eps=1e-5
)
