"""Rotary options in GGUF metadata to a RopeSpec."""

from __future__ import annotations

from dataclasses import replace

from batchgen_lite.errors import CheckpointError, UnsupportedError
from batchgen_lite.models.config_keys import Config
from batchgen_lite.models.gguf_architectures import Architecture
from batchgen_lite.models.rope_config import yarn_mscale
from batchgen_lite.models.spec import RopeSpec
from batchgen_lite.offload.checkpoint.matrices import TensorMatrix, read_dense
from batchgen_lite.offload.checkpoint.tensors import Checkpoint


def gguf_rope(checkpoint: Checkpoint, keys: Config, architecture: Architecture, channels: int) -> RopeSpec:
    """The RopeSpec of heads with ``channels`` channels that may rotate.

    Llama 3's scaling is stored not as parameters but as one factor per frequency, in ``rope_freqs.weight``.
    """
    dim = keys.integer("rope.dimension_count", default=channels)
    if dim > channels or dim % 2:
        raise CheckpointError(f"{keys.source}: rope.dimension_count is {dim}; must be even and at most {channels}.")
    theta = keys.number("rope.freq_base", default=10_000.0)
    kind = keys.text("rope.scaling.type", default="none")
    linear = keys.number("rope.scale_linear", default=1.0)
    if kind == "none" and linear != 1.0:
        kind = "linear"
    base = RopeSpec(theta=theta, dim=dim, interleaved=architecture.interleaved)
    factors = _frequency_factors(checkpoint, dim)
    if kind == "none":
        return replace(base, freq_factors=factors)
    if factors is not None:
        raise UnsupportedError(
            f"{keys.source}: rope scaling {kind!r} together with rope_freqs.weight is not implemented."
        )
    if kind == "linear":
        return replace(base, kind="linear", factor=keys.number("rope.scaling.factor", default=linear))
    if kind != "yarn":
        raise UnsupportedError(
            f"{keys.source}: rope scaling {kind!r} is not implemented; only none, linear and yarn are."
        )
    return _yarn(keys, architecture, base)


def _yarn(keys: Config, architecture: Architecture, base: RopeSpec) -> RopeSpec:
    for option in ("rope.scaling.yarn_ext_factor", "rope.scaling.yarn_attn_factor", "rope.scaling.attn_factor"):
        if keys.number(option, default=1.0, positive=False) not in (1.0, -1.0):
            raise UnsupportedError(f"{keys.source}: {option} = {keys.value(option)} is not implemented.")
    return replace(
        base,
        kind="yarn",
        factor=keys.number("rope.scaling.factor"),
        original_max_positions=keys.integer(
            "rope.scaling.original_context_length", default=keys.integer("context_length")
        ),
        beta_fast=keys.number("rope.scaling.yarn_beta_fast", default=32.0),
        beta_slow=keys.number("rope.scaling.yarn_beta_slow", default=1.0),
        # DeepSeek's two mscale values are equal and cancel on cos and sin; what remains is in the softmax scale.
        attention_factor=1.0 if architecture.mla else None,
        truncate=architecture.yarn_truncate,
    )


def mla_scale(keys: Config, rope: RopeSpec, head_dim: int) -> float:
    """DeepSeek's softmax scale, 1 / sqrt(head_dim) times the square of YaRN's mscale; the key holds 0.1 * mscale."""
    multiplier = keys.number("rope.scaling.yarn_log_multiplier", default=0.0, positive=False)
    mscale = yarn_mscale(rope.factor, 10.0 * multiplier) if rope.kind == "yarn" else 1.0
    return float(head_dim**-0.5) * mscale * mscale


def _frequency_factors(checkpoint: Checkpoint, dim: int) -> tuple[float, ...] | None:
    info = checkpoint.tensors.get("rope_freqs.weight")
    if info is None:
        return None
    if info.shape != (dim // 2,):
        raise CheckpointError(
            f"{checkpoint.root}: tensor 'rope_freqs.weight' has shape {list(info.shape)}, but {dim} channels rotate."
        )
    return tuple(read_dense(checkpoint, TensorMatrix(info))[0].tolist())
