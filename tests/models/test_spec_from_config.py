"""config.json to ModelSpec: both generations of keys, defaults, and refusals by name."""

from __future__ import annotations

from typing import Any

import pytest
from tiny_models import FAMILIES, tiny_config

from batchgen_lite.errors import CheckpointError, ModelError, UnsupportedError
from batchgen_lite.models.spec import ModelSpec
from batchgen_lite.models.spec_from_config import spec_from_config

# As transformers 4 wrote them for published models, shortened to a few layers.
QWEN3_MOE: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "attention_bias": False,
    "bos_token_id": 151643,
    "decoder_sparse_step": 1,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 4,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151936,
}
DEEPSEEK_V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "auto_map": {"AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM"},
    "model_type": "deepseek_v3",
    "attention_bias": False,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 5,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "v_head_dim": 128,
    "vocab_size": 129280,
}


def _v4(config: dict[str, Any]) -> dict[str, Any]:
    """A transformers 5 config in the spelling of transformers 4."""
    old = dict(config)
    rope = dict(old.pop("rope_parameters"))
    old["rope_theta"] = rope.pop("rope_theta")
    if "partial_rotary_factor" in rope:
        old["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
    kind = rope.pop("rope_type")
    old["rope_scaling"] = None if kind == "default" else {"type": kind, **rope}
    old["torch_dtype"] = old.pop("dtype")
    return old


def _new(family: str, **overrides: Any) -> dict[str, Any]:
    return {**tiny_config(family, **overrides).to_dict(), "dtype": "bfloat16"}


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_both_generations_of_keys_mean_the_same(family: str) -> None:
    config = _new(family)
    spec = spec_from_config(config)
    assert spec_from_config(_v4(config)) == spec
    assert spec.family == config["model_type"]
    assert (spec.hidden_size, spec.vocab_size, spec.num_layers) == (72, 211, 3)
    assert spec.dtype == "bfloat16"
    assert spec.eos_ids == {2}
    assert spec.bos_id == 1
    assert spec.max_positions == 512


def test_published_qwen3_moe() -> None:
    spec = spec_from_config(QWEN3_MOE, {"eos_token_id": [151645, 151643]})
    assert spec.architecture == "Qwen3MoeForCausalLM"
    assert spec.eos_ids == {151645, 151643}
    layer = spec.layers[3]
    assert layer.dense is None
    assert layer.expert is not None
    assert layer.expert.intermediate == 768
    assert layer.router is not None
    assert (layer.router.num_experts, layer.router.top_k, layer.router.renormalise) == (128, 8, True)
    attention = layer.attention
    assert (attention.num_heads, attention.num_kv_heads, attention.head_dim) == (32, 4, 128)
    assert (attention.qk_norm, attention.window, attention.qkv_bias) == ("head", None, False)
    assert attention.scale == 128**-0.5
    assert attention.rope is not None
    assert attention.rope.theta == 1e6


def test_published_deepseek_v3() -> None:
    spec = spec_from_config(DEEPSEEK_V3)
    assert [layer.dense is not None for layer in spec.layers] == [True, True, True, False, False]
    attention = spec.layers[0].attention
    assert attention.is_mla
    assert (attention.head_dim, attention.rope_head_dim, attention.v_head_dim) == (192, 64, 128)
    mscale = 0.1 * 1.0 * 3.6888794541139363 + 1.0  # ln 40
    assert attention.scale == pytest.approx(192**-0.5 * mscale**2, rel=1e-12)
    assert attention.rope is not None
    assert attention.rope.interleaved
    router = spec.layers[4].router
    assert router is not None
    assert (router.scoring, router.group_score, router.num_groups, router.topk_group) == ("sigmoid", "top2", 8, 4)
    assert router.correction_bias
    assert spec.max_positions == 163840


def test_windows() -> None:
    def layers(family: str, **overrides: Any) -> list[int | None]:
        return [layer.attention.window for layer in spec_from_config(_new(family, **overrides)).layers]

    assert layers("mistral") == [37, 37, 37]
    assert layers("mistral", sliding_window=None) == [None, None, None]
    assert layers("qwen2") == [None, 29, 29]
    assert layers("qwen2", use_sliding_window=False) == [None, None, None]
    assert layers("gpt_oss") == [24, None, 24]
    assert layers("mixtral", sliding_window=19) == [19, 19, 19]
    assert layers("qwen3_moe", use_sliding_window=True, sliding_window=19) == [19, 19, 19]
    assert layers("qwen2_moe", use_sliding_window=True, sliding_window=19) == [19, None, 19]
    assert layers("qwen3", layer_types=["sliding_attention", "full_attention", "sliding_attention"],
                  use_sliding_window=True, sliding_window=9) == [9, None, 9]  # fmt: skip


def test_windows_without_layer_types_follow_max_window_layers() -> None:
    config = _new("qwen2")
    del config["layer_types"]
    assert [layer.attention.window for layer in spec_from_config(config).layers] == [None, 29, 29]


def test_mistral_without_the_key_slides_over_4096() -> None:
    config = _new("mistral")
    del config["sliding_window"]
    assert spec_from_config(config).layers[0].attention.window == 4096


def test_gpt_oss_switches() -> None:
    spec = spec_from_config(_new("gpt_oss"))
    layer = spec.layers[0]
    assert layer.attention.sinks
    assert layer.attention.qkv_bias
    assert layer.attention.out_bias
    assert layer.expert is not None
    assert (layer.expert.activation, layer.expert.alpha, layer.expert.limit, layer.expert.bias) == (
        "swigluoai",
        1.702,
        7.0,
        True,
    )
    assert layer.router is not None
    assert (layer.router.scoring, layer.router.bias) == ("softmax_topk", True)
    config = _new("gpt_oss")
    config["rope_parameters"] = None
    rope = spec_from_config(config).layers[0].attention.rope
    assert rope is not None
    assert (rope.kind, rope.theta, rope.factor, rope.truncate) == ("yarn", 150000.0, 32.0, False)


def test_granite_scales() -> None:
    spec = spec_from_config(_new("granitemoe"))
    assert (spec.embedding_scale, spec.residual_scale) == (1.5, 0.4)
    assert spec.logit_scale == pytest.approx(1 / 1.5)
    assert spec.layers[0].attention.scale == 0.2


def test_yarn_on_top_of_a_short_config_lengthens_the_limit() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    assert spec_from_config({**QWEN3_MOE, "rope_scaling": yarn}).max_positions == 131072


def test_dtype_falls_back_on_the_stored_one() -> None:
    config = {key: value for key, value in QWEN3_MOE.items() if key != "torch_dtype"}
    assert spec_from_config(config, stored_dtype="float16").dtype == "float16"
    with pytest.raises(UnsupportedError, match="states no dtype"):
        spec_from_config(config)


def test_model_type_alone_is_enough() -> None:
    config = {key: value for key, value in QWEN3_MOE.items() if key != "architectures"}
    assert spec_from_config(config).family == "qwen3_moe"


def test_a_derived_model_type_of_a_known_architecture() -> None:
    spec: ModelSpec = spec_from_config({**DEEPSEEK_V3, "model_type": "kimi_k2"})
    assert spec.family == "deepseek_v3"


_REFUSED: list[tuple[dict[str, Any], dict[str, Any], type[ModelError], str]] = [
    (QWEN3_MOE, {"architectures": ["MambaForCausalLM"], "model_type": "mamba"}, UnsupportedError, "MambaForCausalLM"),
    (QWEN3_MOE, {"architectures": ["MambaForCausalLM"]}, UnsupportedError, "Supported: .*MixtralForCausalLM"),
    (QWEN3_MOE, {"architectures": ["OwnForCausalLM"], "auto_map": {"AutoConfig": "x.Y"}}, UnsupportedError, "remote"),
    (QWEN3_MOE, {"model_type": "llama"}, UnsupportedError, "contradicts model_type 'llama'"),
    (QWEN3_MOE, {"architectures": "Qwen3MoeForCausalLM"}, CheckpointError, "list of names"),
    (QWEN3_MOE, {"architectures": None, "model_type": None}, CheckpointError, "neither"),
    (QWEN3_MOE, {"hidden_act": "relu2"}, UnsupportedError, "relu2.*silu"),
    (QWEN3_MOE, {"rope_scaling": {"rope_type": "longrope"}}, UnsupportedError, "longrope.*yarn"),
    (QWEN3_MOE, {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, UnsupportedError, "dynamic"),
    (QWEN3_MOE, {"rope_scaling": {"type": "linear", "factor": 2, "beta": 1}}, UnsupportedError, "beta"),
    (QWEN3_MOE, {"rope_scaling": {"type": "llama3", "factor": 2}}, CheckpointError, "low_freq_factor"),
    (QWEN3_MOE, {"partial_rotary_factor": 0.5}, UnsupportedError, "partial_rotary_factor"),
    (QWEN3_MOE, {"torch_dtype": "float8_e4m3fn"}, UnsupportedError, "float8"),
    (QWEN3_MOE, {"hidden_size": None}, CheckpointError, "hidden_size"),
    (QWEN3_MOE, {"hidden_size": "2048"}, CheckpointError, "integer"),
    (QWEN3_MOE, {"num_hidden_layers": 0}, CheckpointError, "num_hidden_layers"),
    (QWEN3_MOE, {"num_hidden_layers": True}, CheckpointError, "num_hidden_layers"),
    (QWEN3_MOE, {"rms_norm_eps": float("nan")}, CheckpointError, "finite"),
    (QWEN3_MOE, {"num_experts_per_tok": 129}, CheckpointError, "129.*128 experts"),
    (QWEN3_MOE, {"num_key_value_heads": 5}, CheckpointError, "evenly"),
    (QWEN3_MOE, {"layer_types": ["full_attention"] * 3}, CheckpointError, "4 strings"),
    (QWEN3_MOE, {"layer_types": ["full_attention", "sliding_attention"] * 2}, UnsupportedError, "mixes"),
    (QWEN3_MOE, {"eos_token_id": "x"}, CheckpointError, "eos_token_id"),
    (DEEPSEEK_V3, {"scoring_func": "softmax"}, UnsupportedError, "scoring_func"),
    (DEEPSEEK_V3, {"topk_method": "greedy"}, UnsupportedError, "topk_method"),
    (DEEPSEEK_V3, {"moe_layer_freq": 2}, UnsupportedError, "moe_layer_freq"),
    (DEEPSEEK_V3, {"n_group": 7}, CheckpointError, "n_group = 7"),
    (DEEPSEEK_V3, {"topk_group": 9}, CheckpointError, "topk_group = 9"),
    (DEEPSEEK_V3, {"n_group": 64, "topk_group": 1}, CheckpointError, "cannot give 8"),
]


@pytest.mark.parametrize(("config", "changes", "error", "match"), _REFUSED)
def test_refusals(config: dict[str, Any], changes: dict[str, Any], error: type[ModelError], match: str) -> None:
    with pytest.raises(error, match=match):
        spec_from_config({**config, **changes})


@pytest.mark.parametrize(
    ("family", "changes", "match"),
    [
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv"),
        ("deepseek_v2", {"topk_method": "noaux_tc"}, "noaux_tc"),
        ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob"),
        ("gpt_oss", {"hidden_act": "gelu"}, "hidden_act"),
        ("qwen3", {"layer_types": ["full_attention", "chunked_attention", "full_attention"]}, "chunked_attention"),
        ("mistral", {"layer_types": ["full_attention", "sliding_attention", "full_attention"]}, "mixes"),
        ("glm4_moe_lite", {"mlp_layer_types": ["dense", "sparse", "odd"]}, "odd"),
        ("glm4_moe_lite", {"mlp_layer_types": None, "first_k_dense_replace": 2}, "first_k_dense_replace"),
        ("llama", {"rope_parameters": {"a": {"rope_theta": 1.0}, "b": {"rope_theta": 2.0}}}, "layer type"),
    ],
)
def test_refused_options_of_a_family(family: str, changes: dict[str, Any], match: str) -> None:
    with pytest.raises(UnsupportedError, match=match):
        spec_from_config({**_new(family), **changes})


def test_rope_parameters_by_layer_type_that_agree() -> None:
    config = _new("qwen3")
    rope = dict(config["rope_parameters"])
    nested = {**config, "rope_parameters": {"full_attention": rope, "sliding_attention": dict(rope)}}
    assert spec_from_config(nested) == spec_from_config(config)
