"""What families share: reading the fields that most config files have, into parts of a ModelSpec."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from batchgen_lite.errors import CheckpointError, UnsupportedError
from batchgen_lite.models.config_keys import Config
from batchgen_lite.models.rope_config import rope_from_config
from batchgen_lite.models.spec import AttentionSpec, FFNSpec, LayerSpec, RouterSpec

_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}


@dataclass(frozen=True, slots=True)
class Scales:
    """Constant factors on the residual stream; see ModelSpec."""

    embedding: float = 1.0
    residual: float = 1.0
    logit: float = 1.0


@dataclass(frozen=True, slots=True)
class Family:
    """One architecture family. ``layers`` builds its LayerSpecs from a config; ``scales`` its constant factors.

    ``default_theta``, ``default_norm_eps`` and ``default_rope`` are what transformers assumes where the file is
    silent.
    """

    name: str
    architectures: tuple[str, ...]
    model_type: str
    layers: Callable[[Config, Family], tuple[LayerSpec, ...]]
    default_theta: float = 10_000.0
    default_norm_eps: float = 1e-6
    default_rope: Mapping[str, Any] | None = None
    default_partial_rotary: float = 1.0
    scales: Callable[[Config], Scales] = field(default=lambda config: Scales())


def activation(config: Config) -> str:
    """The FFN's activation, by its name here; UnsupportedError for one that is not implemented."""
    name = config.text("hidden_act", "hidden_activation", default="silu")
    if name not in _ACTIVATIONS:
        raise UnsupportedError(
            f"{config.source}: activation {name!r} is not implemented; only {', '.join(sorted(_ACTIVATIONS))} are."
        )
    return _ACTIVATIONS[name]


def num_layers(config: Config) -> int:
    return config.integer("num_hidden_layers")


def ffn(config: Config, *size_keys: str, bias: bool = False) -> FFNSpec:
    """A gated FFN whose width stands under one of ``size_keys``."""
    return FFNSpec(intermediate=config.integer(*size_keys), activation=activation(config), bias=bias)


def num_experts(config: Config) -> int:
    return config.integer("num_experts", "num_local_experts", "n_routed_experts")


def router(config: Config, **switches: Any) -> RouterSpec:
    """A RouterSpec with the counts of the config and the family's ``switches``."""
    experts, top_k = num_experts(config), config.integer("num_experts_per_tok")
    if top_k > experts:
        raise CheckpointError(f"{config.source}: num_experts_per_tok is {top_k}, but there are {experts} experts.")
    return RouterSpec(num_experts=experts, top_k=top_k, **switches)


def attention(
    config: Config,
    family: Family,
    *,
    default_head_dim: int | None = None,
    scale: float | None = None,
    layer_type: str | None = None,
    **switches: Any,
) -> AttentionSpec:
    """Grouped-query attention with the counts of the config and the family's ``switches``.

    ``default_head_dim``: transformers' default for the architecture; None: hidden_size // num_attention_heads.
    """
    heads = config.integer("num_attention_heads")
    kv_heads = config.integer("num_key_value_heads", default=heads)
    if heads % kv_heads:
        raise CheckpointError(
            f"{config.source}: {heads} attention heads cannot share {kv_heads} key/value heads evenly."
        )
    head_dim = config.integer("head_dim", default=default_head_dim or config.integer("hidden_size") // heads)
    rope = rope_from_config(
        config,
        head_dim,
        default_theta=family.default_theta,
        default_partial=family.default_partial_rotary,
        default=family.default_rope,
        layer_type=layer_type,
    )
    return AttentionSpec(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        v_head_dim=head_dim,
        scale=head_dim**-0.5 if scale is None else scale,
        rope=rope,
        **switches,
    )


def windows(config: Config, window: int | None, default: Sequence[bool]) -> tuple[int | None, ...]:
    """The window of every layer: where ``layer_types`` says sliding_attention, or by ``default`` without it."""
    types = config.strings("layer_types", length=num_layers(config))
    if types is None:
        return tuple(window if sliding else None for sliding in default)
    unknown = sorted(set(types) - {"full_attention", "sliding_attention"})
    if unknown:
        raise UnsupportedError(
            f"{config.source}: attention of type {', '.join(unknown)} is not implemented; "
            "only full_attention and sliding_attention are."
        )
    if window is None and "sliding_attention" in types:
        raise CheckpointError(f"{config.source}: layer_types asks for sliding attention, but sliding_window is null.")
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def uniform_window(config: Config, window: int | None) -> int | None:
    """For architectures that slide on all layers or on none: refuses ``layer_types`` that say otherwise."""
    types = config.strings("layer_types", length=num_layers(config))
    expected = "full_attention" if window is None else "sliding_attention"
    if types is not None and any(kind != expected for kind in types):
        raise UnsupportedError(
            f"{config.source}: layer_types mixes attention kinds (sliding_window = {window}), which this architecture "
            "does not do in transformers; only one kind for all layers is implemented."
        )
    return window


def sparse_layers(config: Config) -> tuple[bool, ...]:
    """Which layers are MoE in Qwen's MoE configs (``decoder_sparse_step`` and ``mlp_only_layers``)."""
    step = config.integer("decoder_sparse_step", default=1)
    dense = set(config.integers("mlp_only_layers"))
    return tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(num_layers(config)))


def dense_first(config: Config, *, default: int) -> tuple[bool, ...]:
    """Which layers are MoE where the first ``first_k_dense_replace`` are dense."""
    first = config.integer("first_k_dense_replace", default=default, minimum=0)
    return tuple(layer >= first for layer in range(num_layers(config)))


def shared_experts(config: Config, *, bias: bool = False) -> FFNSpec:
    """``n_shared_experts`` always-active experts as the one wide FFN that they are."""
    width = config.integer("moe_intermediate_size") * config.integer("n_shared_experts")
    return FFNSpec(intermediate=width, activation=activation(config), bias=bias)
