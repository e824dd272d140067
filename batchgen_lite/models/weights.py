"""A model's weights by role: which matrix plays which part. Families fill this in; the decoder only reads it.

Everything is a ``Matrix`` (offload/checkpoint/matrix.py); a vector (norm, bias) is a matrix of one row. Nothing
here holds data: matrices know where their rows lie and how to widen them.
"""

from __future__ import annotations

from dataclasses import dataclass

from batchgen_lite.offload.checkpoint.matrix import Matrix


@dataclass(frozen=True, slots=True)
class GQAWeights:
    """``qkv``: rows = all q heads, then k heads, then v heads, each in rotate-half order unless the spec's rope is
    interleaved [Hq*D + Hkv*D + Hkv*Dv, hidden]; ``out`` [hidden, Hq*Dv]; biases one row each."""

    qkv: Matrix
    out: Matrix
    qkv_bias: Matrix | None = None
    out_bias: Matrix | None = None
    q_norm: Matrix | None = None
    k_norm: Matrix | None = None
    sinks: Matrix | None = None


@dataclass(frozen=True, slots=True)
class MLAWeights:
    """DeepSeek's latent attention. ``q`` [Hq*(nope+rope), hidden] where q_lora_rank is None, else ``q_a`` [rank,
    hidden], ``q_a_norm`` and ``q_b`` [Hq*(nope+rope), rank]. ``kv_a`` [kv_lora_rank + rope, hidden], ``kv_a_norm``,
    ``kv_b`` [Hq*(nope + Dv), kv_lora_rank], per head nope rows then v rows; ``out`` [hidden, Hq*Dv]."""

    kv_a: Matrix
    kv_a_norm: Matrix
    kv_b: Matrix
    out: Matrix
    q: Matrix | None = None
    q_a: Matrix | None = None
    q_a_norm: Matrix | None = None
    q_b: Matrix | None = None
    q_bias: Matrix | None = None
    kv_a_bias: Matrix | None = None
    out_bias: Matrix | None = None


@dataclass(frozen=True, slots=True)
class FFNWeights:
    """``gate_up``: a pair, outputs_per_row 2 [2 * intermediate, hidden]; ``down`` [hidden, intermediate].
    ``gate_up_bias`` one row [2 * intermediate], gate first; ``down_bias`` one row [hidden]."""

    gate_up: Matrix
    down: Matrix
    gate_up_bias: Matrix | None = None
    down_bias: Matrix | None = None


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer. Exactly one of ``dense`` and ``experts`` is filled. ``router`` [num_experts, hidden]."""

    attention_norm: Matrix
    attention: GQAWeights | MLAWeights
    ffn_norm: Matrix
    dense: FFNWeights | None = None
    router: Matrix | None = None
    router_bias: Matrix | None = None
    correction_bias: Matrix | None = None
    experts: tuple[FFNWeights, ...] = ()
    shared: FFNWeights | None = None
    shared_gate: Matrix | None = None  # [1, hidden]


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """The whole model. ``head`` is the embedding itself where the model ties them. [vocab, hidden] both."""

    embedding: Matrix
    layers: tuple[LayerWeights, ...]
    final_norm: Matrix
    head: Matrix
    head_bias: Matrix | None = None
