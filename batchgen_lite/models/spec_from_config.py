"""config.json and generation_config.json to a ModelSpec."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from batchgen_lite.errors import UnsupportedError
from batchgen_lite.models.config_keys import Config
from batchgen_lite.models.families.common import Family
from batchgen_lite.models.families.registry import find_family
from batchgen_lite.models.rope_config import rope_parameters
from batchgen_lite.models.spec import ModelSpec

DTYPES = ("bfloat16", "float16", "float32")


def spec_from_config(
    config: Mapping[str, Any],
    generation_config: Mapping[str, Any] | None = None,
    *,
    stored_dtype: str | None = None,
) -> ModelSpec:
    """The model that ``config`` (a parsed config.json) describes.

    ``stored_dtype``: what the weights are stored in, for files that state no dtype. Raises UnsupportedError for an
    architecture, rope type, activation or router option that is not implemented, CheckpointError for missing or
    senseless values.
    """
    reader = Config(config)
    family, architecture = find_family(reader)
    layers = family.layers(reader, family)
    scales = family.scales(reader)
    generation = Config(generation_config or {}, "generation_config.json")
    return ModelSpec(
        family=family.name,
        architecture=architecture,
        hidden_size=reader.integer("hidden_size"),
        vocab_size=reader.integer("vocab_size"),
        layers=layers,
        norm_eps=reader.number("rms_norm_eps", default=family.default_norm_eps),
        max_positions=_max_positions(reader, family),
        dtype=_dtype(reader, stored_dtype),
        tie_embeddings=reader.flag("tie_word_embeddings", default=False),
        embedding_scale=scales.embedding,
        residual_scale=scales.residual,
        logit_scale=scales.logit,
        eos_ids=frozenset(reader.integers("eos_token_id") + generation.integers("eos_token_id")),
        bos_id=reader.optional_integer("bos_token_id", minimum=0),
    )


def _dtype(config: Config, stored: str | None) -> str:
    name = config.text("dtype", "torch_dtype", default=stored or "").removeprefix("torch.")
    if not name:
        raise UnsupportedError(f'{config.source} states no dtype; add "dtype": "bfloat16" (or float16, float32).')
    if name not in DTYPES:
        raise UnsupportedError(f"{config.source}: dtype {name!r} is not implemented; only {', '.join(DTYPES)} are.")
    return name


def _max_positions(config: Config, family: Family) -> int:
    """``max_position_embeddings``, or what YaRN stretches the original context to where that is longer.

    Qwen's long-context recipe adds YaRN to a config whose max_position_embeddings stays at the short context.
    """
    limit = config.integer("max_position_embeddings")
    rope = rope_parameters(config) if config.has("rope_parameters", "rope_scaling") else {}
    original, factor = rope.get("original_max_position_embeddings"), rope.get("factor")
    if rope.get("rope_type", rope.get("type")) == "yarn" and original and factor:
        limit = max(limit, int(original * factor))
    return limit
