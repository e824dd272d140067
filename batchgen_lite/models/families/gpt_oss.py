"""gpt-oss: sinks, alternating windows, biases everywhere, clamped activation, softmax over the chosen experts."""

from __future__ import annotations

from batchgen_lite.models.config_keys import Config
from batchgen_lite.models.families.common import Family, attention, num_layers, router, windows
from batchgen_lite.models.spec import FFNSpec, LayerSpec

# What transformers takes where config.json has no rope options.
_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def _gpt_oss(config: Config, family: Family) -> tuple[LayerSpec, ...]:
    config.refuse_unless("hidden_act", None, "silu")
    bias = config.flag("attention_bias", default=True)
    window = config.optional_integer("sliding_window") if config.has("sliding_window") else 128
    expert = FFNSpec(
        intermediate=config.integer("intermediate_size"),
        activation="swigluoai",
        alpha=config.number("swiglu_alpha", default=1.702),
        limit=config.number("swiglu_limit", default=7.0),
        bias=True,
    )
    return tuple(
        LayerSpec(
            attention=attention(
                config, family, default_head_dim=64, window=layer_window, sinks=True, qkv_bias=bias, out_bias=bias
            ),
            router=router(config, scoring="softmax_topk", bias=True),
            expert=expert,
        )
        for layer_window in windows(config, window, [layer % 2 == 0 for layer in range(num_layers(config))])
    )


GPT_OSS = Family(
    "gpt_oss",
    ("GptOssForCausalLM",),
    "gpt_oss",
    _gpt_oss,
    default_theta=150_000.0,
    default_norm_eps=1e-5,
    default_rope=_ROPE,
)
