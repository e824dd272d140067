"""Dense families: Llama, Mistral, Qwen2, Qwen3."""

from __future__ import annotations

from batchgen_lite.models.config_keys import Config
from batchgen_lite.models.families.common import (
    Family,
    attention,
    ffn,
    num_layers,
    uniform_window,
    windows,
)
from batchgen_lite.models.spec import LayerSpec


def _llama(config: Config, family: Family) -> tuple[LayerSpec, ...]:
    bias = config.flag("attention_bias", default=False)
    layer = LayerSpec(
        attention=attention(config, family, qkv_bias=bias, out_bias=bias),
        dense=ffn(config, "intermediate_size", bias=config.flag("mlp_bias", default=False)),
    )
    return (layer,) * num_layers(config)


def _mistral(config: Config, family: Family) -> tuple[LayerSpec, ...]:
    # Where the key is absent transformers assumes 4096; an explicit null means no window.
    window = config.optional_integer("sliding_window") if config.has("sliding_window") else 4096
    layer = LayerSpec(
        attention=attention(config, family, window=uniform_window(config, window)),
        dense=ffn(config, "intermediate_size"),
    )
    return (layer,) * num_layers(config)


def qwen_windows(config: Config) -> tuple[int | None, ...]:
    """Qwen2 and Qwen3: the layers from ``max_window_layers`` up slide, if windows are switched on at all."""
    window = None
    if config.flag("use_sliding_window", default=False):
        window = config.integer("sliding_window", default=4096)
    first = config.integer("max_window_layers", default=28, minimum=0)
    return windows(config, window, [layer >= first for layer in range(num_layers(config))])


def _qwen2(config: Config, family: Family) -> tuple[LayerSpec, ...]:
    return tuple(
        LayerSpec(
            attention=attention(config, family, window=window, qkv_bias=True),
            dense=ffn(config, "intermediate_size"),
        )
        for window in qwen_windows(config)
    )


def _qwen3(config: Config, family: Family) -> tuple[LayerSpec, ...]:
    bias = config.flag("attention_bias", default=False)
    return tuple(
        LayerSpec(
            attention=attention(
                config, family, default_head_dim=128, window=window, qk_norm="head", qkv_bias=bias, out_bias=bias
            ),
            dense=ffn(config, "intermediate_size"),
        )
        for window in qwen_windows(config)
    )


LLAMA = Family("llama", ("LlamaForCausalLM",), "llama", _llama)
MISTRAL = Family("mistral", ("MistralForCausalLM",), "mistral", _mistral)
QWEN2 = Family("qwen2", ("Qwen2ForCausalLM",), "qwen2", _qwen2)
QWEN3 = Family("qwen3", ("Qwen3ForCausalLM",), "qwen3", _qwen3)
