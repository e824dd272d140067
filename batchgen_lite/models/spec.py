"""What a model is, as numbers and switches. One decoder is driven by these; no torch import here."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary embedding. ``kind``: "default" | "linear" | "llama3" | "yarn". ``dim``: rotated channels of a head
    (partial rotary if below head_dim; the first ``dim`` channels rotate). ``interleaved``: pairs are (2i, 2i+1)
    rather than (i, i + dim/2). The remaining fields are the published parameters of each kind, None where unused."""

    theta: float
    dim: int
    kind: str = "default"
    interleaved: bool = False
    factor: float = 1.0
    original_max_positions: int | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    freq_factors: tuple[float, ...] | None = None
    """[dim / 2]; each inverse frequency is divided by its factor (how GGUF files store llama3 scaling)."""


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Self-attention of one layer. For MLA (``kv_lora_rank`` set) head_dim = nope + rope channels of a query head.

    ``qk_norm``: None | "head" (RMS over head_dim, one weight for all heads) | "full" (RMS over all heads at once).
    ``window``: a query sees its last ``window`` positions, itself included; None = all.
    ``sinks``: a learned logit per head joins the softmax's denominator.
    ``qkv_bias``, ``out_bias``: the projections have biases (for MLA ``qkv_bias`` means q_a and kv_a).
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    scale: float
    rope: RopeSpec | None
    qk_norm: str | None = None
    window: int | None = None
    sinks: bool = False
    q_lora_rank: int | None = None
    kv_lora_rank: int | None = None
    rope_head_dim: int | None = None  # MLA only: channels of the shared rotary key
    latent_norm_eps: float = 1e-6  # MLA only: eps of the norms on the latents, which is not the model's norm_eps
    qkv_bias: bool = False
    out_bias: bool = False

    @property
    def is_mla(self) -> bool:
        return self.kv_lora_rank is not None


@dataclass(frozen=True, slots=True)
class FFNSpec:
    """A gated feed-forward network (an expert, a shared expert or a dense FFN).

    ``activation``: "silu" | "gelu" | "gelu_tanh" | "swigluoai" (clamped: gate.clamp(max=limit) * sigmoid(alpha *
    gate) * (up.clamp(-limit, limit) + 1), as gpt-oss). ``bias``: gate, up and down have biases."""

    intermediate: int
    activation: str = "silu"
    alpha: float = 1.702
    limit: float = 7.0
    bias: bool = False


@dataclass(frozen=True, slots=True)
class RouterSpec:
    """Expert choice. ``scoring``: "softmax" over all experts before top-k | "softmax_topk" over the chosen k after
    top-k | "sigmoid". ``renormalise``: chosen weights are divided by their sum (+1e-20 for sigmoid). ``scaling``
    multiplies the final weights. Groups: the ``topk_group`` best of ``num_groups`` groups stay eligible, a group's
    score being its best expert ("max") or the sum of its two best ("top2"). ``correction_bias``: a learned bias is
    added for the choice, not for the weights. ``bias``: the router projection itself has one."""

    num_experts: int
    top_k: int
    scoring: str = "softmax"
    renormalise: bool = False
    scaling: float = 1.0
    num_groups: int = 1
    topk_group: int = 1
    group_score: str = "max"
    correction_bias: bool = False
    bias: bool = False


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One decoder layer: ``dense`` is set for a dense layer, ``router`` and ``expert`` for a MoE layer.
    ``shared``: an always-active expert beside the routed ones; ``shared_gated``: scaled by sigmoid(gate . x)."""

    attention: AttentionSpec
    dense: FFNSpec | None = None
    router: RouterSpec | None = None
    expert: FFNSpec | None = None
    shared: FFNSpec | None = None
    shared_gated: bool = False


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A decoder-only model. ``norm_placement``: "pre" (norm before attention and FFN) | "post" (norm on their
    outputs before the residual add). ``dtype``: the checkpoint's compute dtype name ("bfloat16", "float16",
    "float32"); it decides the KV dtype. ``eos_ids``: union over config and generation_config. The scales multiply:
    embeddings, each block's output before the residual add, the logits."""

    family: str
    architecture: str
    hidden_size: int
    vocab_size: int
    layers: tuple[LayerSpec, ...]
    norm_eps: float
    max_positions: int
    dtype: str
    tie_embeddings: bool
    norm_kind: str = "rms"
    norm_placement: str = "pre"
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    eos_ids: frozenset[int] = frozenset()
    bos_id: int | None = None

    @property
    def num_layers(self) -> int:
        return len(self.layers)
