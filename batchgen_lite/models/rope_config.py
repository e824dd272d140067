"""Rotary-embedding options of config.json, in the spellings of transformers 4 and 5, to a RopeSpec."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from batchgen_lite.errors import CheckpointError, UnsupportedError
from batchgen_lite.models.config_keys import Config
from batchgen_lite.models.spec import RopeSpec

KINDS = ("default", "linear", "llama3", "yarn")

_KEYS = {
    "default": frozenset(),
    "linear": frozenset({"factor"}),
    "llama3": frozenset({"factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"}),
    "yarn": frozenset(
        {
            "factor",
            "original_max_position_embeddings",
            "beta_fast",
            "beta_slow",
            "attention_factor",
            "mscale",
            "mscale_all_dim",
            "truncate",
            "finetuned",
        }
    ),
}
_COMMON = frozenset({"rope_type", "type", "rope_theta", "partial_rotary_factor"})
# Written by some tools beside a kind that does not use them; transformers reads none of them for that kind.
_HARMLESS = frozenset({"original_max_position_embeddings", "factor"})


def rope_parameters(config: Config, layer_type: str | None = None) -> dict[str, Any]:
    """The rope options as one flat mapping (without theta where the file states none).

    Transformers 5 writes ``rope_parameters``, either flat or by layer type; transformers 4 wrote ``rope_theta`` at
    the top and ``rope_scaling`` beside it.
    """
    table = config.mapping("rope_scaling") or config.mapping("rope_parameters") or {}
    nested = {key: value for key, value in table.items() if isinstance(value, Mapping)}
    if nested:
        if layer_type is None and len({repr(sorted(value.items())) for value in nested.values()}) > 1:
            raise UnsupportedError(
                f"{config.source}: rope parameters differ by layer type ({', '.join(sorted(nested))}), "
                "which this architecture does not do here."
            )
        key = layer_type if layer_type is not None else next(iter(nested))
        if key not in nested:
            raise CheckpointError(f"{config.source}: rope_parameters has no entry for layer type {key!r}.")
        table = nested[key]
    flat = {key: value for key, value in table.items() if value is not None}
    for name in ("rope_theta", "partial_rotary_factor"):
        if name not in flat and config.value(name) is not None:
            flat[name] = config.value(name)
    return flat


def rope_from_config(
    config: Config,
    channels: int,
    *,
    default_theta: float = 10_000.0,
    default_partial: float = 1.0,
    interleaved: bool = False,
    layer_type: str | None = None,
    default: Mapping[str, Any] | None = None,
) -> RopeSpec:
    """The RopeSpec of a layer whose heads have ``channels`` channels that may rotate.

    ``default``: what transformers assumes for this architecture where the file has no rope options at all.
    Raises UnsupportedError for a kind, or an option of a kind, that is not implemented.
    """
    flat = rope_parameters(config, layer_type)
    if default is not None and config.value("rope_parameters", "rope_scaling") is None:
        flat = {**default, **flat}
    values = Config(flat, f"{config.source}: rope parameters")
    kind = values.text("rope_type", "type", default="default")
    if kind not in KINDS:
        raise UnsupportedError(f"{config.source}: rope type {kind!r} is not implemented; only {', '.join(KINDS)} are.")
    unknown = sorted(flat.keys() - _COMMON - _KEYS[kind] - _HARMLESS)
    if unknown:
        raise UnsupportedError(
            f"{config.source}: rope type {kind!r} with {', '.join(unknown)} is not implemented; "
            f"known here: {', '.join(sorted(_KEYS[kind])) or 'no further options'}."
        )
    partial = values.number("partial_rotary_factor", default=default_partial)
    if partial != 1.0 and default_partial == 1.0:
        raise UnsupportedError(f"{config.source}: partial_rotary_factor = {partial} is not known of this architecture.")
    dim = int(channels * partial)
    if not 2 <= dim <= channels or dim % 2:
        raise CheckpointError(f"{config.source}: {dim} rotary channels of {channels}; must be even and from 2 up.")
    theta = values.number("rope_theta", default=default_theta)
    return _of_kind(kind, values, config, RopeSpec(theta=theta, dim=dim, kind=kind, interleaved=interleaved))


def _of_kind(kind: str, values: Config, config: Config, base: RopeSpec) -> RopeSpec:
    def build(**fields: Any) -> RopeSpec:
        return RopeSpec(theta=base.theta, dim=base.dim, kind=kind, interleaved=base.interleaved, **fields)

    if kind == "default":
        return base
    if kind == "linear":
        return build(factor=values.number("factor"))
    original = _original_positions(values, config)
    if kind == "llama3":
        return build(
            factor=values.number("factor"),
            original_max_positions=original,
            low_freq_factor=values.number("low_freq_factor"),
            high_freq_factor=values.number("high_freq_factor"),
        )
    # A null factor means the ratio of the two lengths (DeepSeek's convention, as in transformers).
    ratio = config.integer("max_position_embeddings") / original
    return build(
        factor=values.number("factor", default=ratio),
        original_max_positions=original,
        beta_fast=values.number("beta_fast", default=32.0),
        beta_slow=values.number("beta_slow", default=1.0),
        attention_factor=None if values.value("attention_factor") is None else values.number("attention_factor"),
        mscale=_optional_number(values, "mscale"),
        mscale_all_dim=_optional_number(values, "mscale_all_dim"),
        truncate=values.flag("truncate", default=True),
    )


def _optional_number(values: Config, name: str) -> float | None:
    return None if values.value(name) is None else values.number(name, positive=False)


def _original_positions(values: Config, config: Config) -> int:
    # The top-level key wins over the one inside, as in transformers; without either the trained length is the limit.
    if config.value("original_max_position_embeddings") is not None:
        return config.integer("original_max_position_embeddings")
    if values.value("original_max_position_embeddings") is not None:
        return values.integer("original_max_position_embeddings")
    return config.integer("max_position_embeddings")


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """0.1 * mscale * ln(factor) + 1, the magnitude correction of YaRN (arXiv 2309.00071, section 3.4)."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
