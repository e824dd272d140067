"""GGUF metadata to a ModelSpec.

Key names and defaults are those of llama.cpp, whose files these are; what the metadata does not say (qk norms, how
experts are weighted) is fixed per architecture there, and in ``gguf_architectures`` here.
"""

from __future__ import annotations

from typing import Any

from batchgen_lite.errors import CheckpointError, UnsupportedError
from batchgen_lite.models.config_keys import Config
from batchgen_lite.models.gguf_architectures import ARCHITECTURES, Architecture
from batchgen_lite.models.gguf_rope import gguf_rope, mla_scale
from batchgen_lite.models.spec import AttentionSpec, FFNSpec, LayerSpec, ModelSpec, RouterSpec
from batchgen_lite.offload.checkpoint.tensors import Checkpoint

_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_GATING = {1: "softmax", 2: "sigmoid", 3: "softmax_topk"}  # llama.cpp's llama_expert_gating_func_type

# Options beside attention, rope and experts that change the maths, and that none of our architectures has.
_REFUSED = (
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "router_logit_softcapping",
    "logit_scale",
    "residual_scale",
    "embedding_scale",
    "moe_every_n_layers",
    "interleave_moe_layer_step",
    "use_parallel_residual",
)
# Of these groups every key changes the maths, so those not listed are refused.
_GROUPS = ("attention.", "rope.", "expert")
_KNOWN = {
    "attention": "causal head_count head_count_kv key_length key_length_mla kv_lora_rank layer_norm_epsilon "
    "layer_norm_rms_epsilon q_lora_rank scale sliding_window value_length value_length_mla",
    "rope": "dimension_count freq_base scale_linear scaling.attn_factor scaling.factor scaling.finetuned "
    "scaling.original_context_length scaling.type scaling.yarn_attn_factor scaling.yarn_beta_fast "
    "scaling.yarn_beta_slow scaling.yarn_ext_factor scaling.yarn_log_multiplier",
}
_KNOWN_KEYS = {f"{group}.{key}" for group, keys in _KNOWN.items() for key in keys.split()} | {
    "expert_count",
    "expert_feed_forward_length",
    "expert_gating_func",
    "expert_group_count",
    "expert_group_used_count",
    "expert_shared_count",
    "expert_shared_feed_forward_length",
    "expert_used_count",
    "expert_weights_norm",
    "expert_weights_scale",
}


def spec_from_gguf(checkpoint: Checkpoint) -> ModelSpec:
    """The model that a GGUF file's metadata describes; also reads ``rope_freqs.weight`` if the file has one.

    Raises UnsupportedError for an architecture or option that is not implemented, CheckpointError for missing or
    senseless values.
    """
    name = checkpoint.metadata.get("general.architecture")
    architecture = ARCHITECTURES.get(name) if isinstance(name, str) else None
    if architecture is None:
        raise UnsupportedError(
            f"{checkpoint.root}: GGUF architecture {name!r} is not implemented; supported: "
            f"{', '.join(sorted(ARCHITECTURES))}."
        )
    keys = architecture_keys(checkpoint, architecture.name)
    embedding = checkpoint.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise CheckpointError(f"{checkpoint.root}: tensor 'token_embd.weight' is missing or no matrix.")
    return ModelSpec(
        family=architecture.moe_family if keys.value("expert_count") else architecture.family,
        architecture=architecture.name,
        hidden_size=keys.integer("embedding_length"),
        vocab_size=embedding.shape[0],
        layers=_layers(checkpoint, keys, architecture),
        norm_eps=keys.number("attention.layer_norm_rms_epsilon"),
        max_positions=keys.integer("context_length"),
        dtype=_dtype(checkpoint),
        tie_embeddings="output.weight" not in checkpoint.tensors,
        eos_ids=_eos_ids(checkpoint),
        bos_id=Config(checkpoint.metadata, str(checkpoint.root)).optional_integer(
            "tokenizer.ggml.bos_token_id", minimum=0
        ),
    )


def architecture_keys(checkpoint: Checkpoint, name: str) -> Config:
    """The keys under ``name.``, that prefix removed; a list of equal numbers (one per layer) becomes the number."""
    keys: dict[str, Any] = {}
    for key, value in checkpoint.metadata.items():
        if key.startswith(name + "."):
            single = isinstance(value, list) and value and all(item == value[0] for item in value)
            keys[key.removeprefix(name + ".")] = value[0] if single else value
    for key, value in keys.items():
        unknown = key.startswith(_GROUPS) and key not in _KNOWN_KEYS
        if value and (key in _REFUSED or unknown):
            raise UnsupportedError(f"{checkpoint.root}: {name}.{key} = {value!r} is not implemented.")
    return Config(keys, f"{checkpoint.root} ({name}.*)")


def _dtype(checkpoint: Checkpoint) -> str:
    """The dtype of the matrices where they have one; quantised files count as float16, like llama.cpp's KV cache."""
    encodings = [info.encoding for info in checkpoint.tensors.values() if len(info.shape) > 1]
    plain = {encoding for encoding in encodings if encoding in _DTYPES}
    if len(plain) < len(set(encodings)):
        return "float16"
    return _DTYPES[max(sorted(plain), key=encodings.count)]


def _eos_ids(checkpoint: Checkpoint) -> frozenset[int]:
    keys = Config(checkpoint.metadata, str(checkpoint.root))
    names = ("eos_token_id", "eot_token_id", "eom_token_id", "eos_token_ids")
    return frozenset(token for name in names for token in keys.integers(f"tokenizer.ggml.{name}"))


def _layers(checkpoint: Checkpoint, keys: Config, architecture: Architecture) -> tuple[LayerSpec, ...]:
    count = keys.integer("block_count") - keys.integer("nextn_predict_layers", default=0, minimum=0)
    dense_first = keys.integer("leading_dense_block_count", default=0, minimum=0)
    experts = keys.optional_integer("expert_count", minimum=0) or 0
    if architecture.needs_experts and not experts:
        raise CheckpointError(f"{keys.source}: expert_count is missing, which this architecture needs.")
    build = _mla if architecture.mla else _gqa
    full = build(checkpoint, keys, architecture, None)
    window = _window(keys, architecture)
    sliding = full if window is None else build(checkpoint, keys, architecture, window)
    layers = []
    for index in range(count):
        attention = sliding if index % 2 == 0 else full  # gpt-oss alternates, beginning with a window
        if experts and index >= dense_first:
            layers.append(_moe_layer(checkpoint, keys, architecture, attention, experts))
        else:
            width = keys.integer("feed_forward_length")
            layers.append(LayerSpec(attention=attention, dense=FFNSpec(intermediate=width)))
    return tuple(layers)


def _window(keys: Config, architecture: Architecture) -> int | None:
    window = keys.optional_integer("attention.sliding_window", minimum=0) or None
    if window is None or architecture.sliding:
        return window
    if window < keys.integer("context_length"):
        raise UnsupportedError(
            f"{keys.source}: attention.sliding_window = {window} is not implemented for this architecture: the file "
            "does not say which layers slide."
        )
    return None


def _head_counts(keys: Config) -> tuple[int, int]:
    heads = keys.integer("attention.head_count")
    kv_heads = keys.integer("attention.head_count_kv", default=heads)
    if heads % kv_heads:
        raise CheckpointError(f"{keys.source}: {heads} attention heads cannot share {kv_heads} key/value heads evenly.")
    return heads, kv_heads


def _gqa(checkpoint: Checkpoint, keys: Config, architecture: Architecture, window: int | None) -> AttentionSpec:
    heads, kv_heads = _head_counts(keys)
    head_dim = keys.integer("attention.key_length", default=keys.integer("embedding_length") // heads)
    rope = gguf_rope(checkpoint, keys, architecture, head_dim)
    if architecture.permuted and rope.dim != head_dim:
        raise UnsupportedError(f"{keys.source}: rope over {rope.dim} of {head_dim} channels is not implemented here.")
    return AttentionSpec(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        v_head_dim=keys.integer("attention.value_length", default=head_dim),
        scale=keys.number("attention.scale", default=head_dim**-0.5),
        rope=rope,
        qk_norm=architecture.qk_norm,
        window=window,
        sinks=architecture.sinks,
        qkv_bias="blk.0.attn_q.bias" in checkpoint.tensors,
        out_bias="blk.0.attn_output.bias" in checkpoint.tensors,
    )


def _mla(checkpoint: Checkpoint, keys: Config, architecture: Architecture, window: int | None) -> AttentionSpec:
    heads = keys.integer("attention.head_count")
    # Newer files describe the absorbed form (one wide KV head) under the plain keys, the model under ``_mla``.
    head_dim = keys.integer("attention.key_length_mla", "attention.key_length")
    rope = gguf_rope(checkpoint, keys, architecture, keys.integer("rope.dimension_count"))
    return AttentionSpec(
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=head_dim,
        v_head_dim=keys.integer("attention.value_length_mla", "attention.value_length"),
        scale=mla_scale(keys, rope, head_dim),
        rope=rope,
        window=window,
        q_lora_rank=keys.optional_integer("attention.q_lora_rank"),
        kv_lora_rank=keys.integer("attention.kv_lora_rank"),
        rope_head_dim=rope.dim,
        latent_norm_eps=keys.number("attention.layer_norm_rms_epsilon"),
    )


def _moe_layer(
    checkpoint: Checkpoint, keys: Config, architecture: Architecture, attention: AttentionSpec, experts: int
) -> LayerSpec:
    router = _router(checkpoint, keys, architecture, experts)
    inner = keys.integer("feed_forward_length")
    # Fallbacks as in llama.cpp for files from before these keys.
    fallback = inner // router.top_k if architecture.narrow_experts else inner
    width = keys.integer("expert_feed_forward_length", default=fallback)
    expert = FFNSpec(intermediate=width, activation=architecture.activation, bias=architecture.expert_bias)
    shared = None
    if architecture.shared_experts:
        shared_count = keys.integer("expert_shared_count", default=1)
        shared_width = width * shared_count if architecture.mla else inner
        shared = FFNSpec(intermediate=keys.integer("expert_shared_feed_forward_length", default=shared_width))
    return LayerSpec(
        attention=attention,
        router=router,
        expert=expert,
        shared=shared,
        shared_gated=architecture.shared_gated,
    )


def _router(checkpoint: Checkpoint, keys: Config, architecture: Architecture, experts: int) -> RouterSpec:
    gating = keys.integer("expert_gating_func", default=0, minimum=0)
    if gating not in (0, *_GATING):
        raise UnsupportedError(f"{keys.source}: expert_gating_func = {gating} is not implemented; 1, 2 and 3 are.")
    scoring = _GATING.get(gating, architecture.scoring)
    top_k = keys.integer("expert_used_count")
    if top_k > experts:
        raise CheckpointError(f"{keys.source}: expert_used_count is {top_k}, but there are {experts} experts.")
    groups = keys.integer("expert_group_count", default=1, minimum=0) or 1
    scaling = keys.number("expert_weights_scale", default=1.0, positive=False) or 1.0  # 0 stands for "not set"
    biased = any(name.endswith((".exp_probs_b.bias", ".exp_probs_b")) for name in checkpoint.tensors)
    return RouterSpec(
        num_experts=experts,
        top_k=top_k,
        scoring=scoring,
        renormalise=keys.flag("expert_weights_norm", default=architecture.renormalise),
        scaling=scaling,
        num_groups=groups,
        topk_group=keys.integer("expert_group_used_count", default=groups, minimum=0) or groups,
        group_score="top2" if scoring == "sigmoid" else "max",
        correction_bias=biased,
        bias=architecture.expert_bias,
    )
