"""Which tensor plays which role: the names in Hugging Face checkpoints and in GGUF files.

A role has several spellings, over families and over versions of the writing tools; the first that a checkpoint has
is taken. Should it have two, the second stays unused and the checkpoint is refused, so one table serves all families.
``{i}`` stands for the layer, ``{e}`` for the expert. Weights are named without their ``.weight``; a bias has the
same name with ``.bias``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

Names = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TensorNames:
    """Spellings by role; an empty tuple where the format has no such tensor."""

    embedding: Names
    final_norm: Names
    head: Names
    attention_norm: Names
    ffn_norm: Names
    q: Names
    k: Names
    v: Names
    out: Names
    q_norm: Names
    k_norm: Names
    sinks: Names
    q_a: Names
    q_a_norm: Names
    q_b: Names
    kv_a: Names
    kv_a_norm: Names
    kv_b: Names
    k_b: Names  # GGUF only: the key half of kv_b, transposed per head, and its value half
    v_b: Names
    gate: Names
    up: Names
    down: Names
    router: Names
    router_bias: Names
    correction_bias: Names
    expert_gate: Names  # one tensor per expert
    expert_up: Names
    expert_down: Names
    packed_expert: Names  # written by ``pack``: fused gate_up, gate rows first, and down, with biases in fp32
    stacked_gate_up: Names  # one tensor for all experts, gate and up fused
    stacked_gate: Names  # one tensor for all experts
    stacked_up: Names
    stacked_down: Names
    shared_gate: Names
    shared_up: Names
    shared_gate_up: Names  # gate rows first, then up rows
    shared_down: Names
    shared_expert_gate: Names


_MLP, _SPARSE = "model.layers.{i}.mlp.", "model.layers.{i}.block_sparse_moe."
_ATTENTION = "model.layers.{i}.self_attn."

HUGGING_FACE = TensorNames(
    embedding=("model.embed_tokens",),
    final_norm=("model.norm",),
    head=("lm_head",),
    attention_norm=("model.layers.{i}.input_layernorm",),
    ffn_norm=("model.layers.{i}.post_attention_layernorm",),
    q=(_ATTENTION + "q_proj",),
    k=(_ATTENTION + "k_proj",),
    v=(_ATTENTION + "v_proj",),
    out=(_ATTENTION + "o_proj",),
    q_norm=(_ATTENTION + "q_norm",),
    k_norm=(_ATTENTION + "k_norm",),
    sinks=(_ATTENTION + "sinks",),
    q_a=(_ATTENTION + "q_a_proj",),
    q_a_norm=(_ATTENTION + "q_a_layernorm",),
    q_b=(_ATTENTION + "q_b_proj",),
    kv_a=(_ATTENTION + "kv_a_proj_with_mqa",),
    kv_a_norm=(_ATTENTION + "kv_a_layernorm",),
    kv_b=(_ATTENTION + "kv_b_proj",),
    k_b=(),
    v_b=(),
    gate=(_MLP + "gate_proj",),
    up=(_MLP + "up_proj",),
    down=(_MLP + "down_proj",),
    router=(
        _MLP + "gate",
        _MLP + "router",
        _SPARSE + "gate",
        _SPARSE + "router.layer",
        _SPARSE + "router",
    ),
    router_bias=(_MLP + "router.bias",),
    correction_bias=(_MLP + "gate.e_score_correction_bias",),
    expert_gate=(_MLP + "experts.{e}.gate_proj", _SPARSE + "experts.{e}.w1", _MLP + "experts.{e}.w1"),
    expert_up=(_MLP + "experts.{e}.up_proj", _SPARSE + "experts.{e}.w3", _MLP + "experts.{e}.w3"),
    expert_down=(_MLP + "experts.{e}.down_proj", _SPARSE + "experts.{e}.w2", _MLP + "experts.{e}.w2"),
    packed_expert=("packed.layers.{i}.experts.{e}.",),
    stacked_gate_up=(
        _MLP + "experts.gate_up_proj",
        _SPARSE + "experts.gate_up_proj",
        _SPARSE + "input_linear",
    ),
    stacked_gate=(),
    stacked_up=(),
    stacked_down=(
        _MLP + "experts.down_proj",
        _SPARSE + "experts.down_proj",
        _SPARSE + "output_linear",
    ),
    shared_gate=(_MLP + "shared_expert.gate_proj", _MLP + "shared_experts.gate_proj"),
    shared_up=(_MLP + "shared_expert.up_proj", _MLP + "shared_experts.up_proj"),
    shared_gate_up=("model.layers.{i}.shared_mlp.input_linear",),
    shared_down=(
        _MLP + "shared_expert.down_proj",
        _MLP + "shared_experts.down_proj",
        "model.layers.{i}.shared_mlp.output_linear",
    ),
    shared_expert_gate=(_MLP + "shared_expert_gate",),
)

GGUF = TensorNames(
    embedding=("token_embd",),
    final_norm=("output_norm",),
    head=("output",),
    attention_norm=("blk.{i}.attn_norm",),
    ffn_norm=("blk.{i}.ffn_norm", "blk.{i}.post_attention_norm"),
    q=("blk.{i}.attn_q",),
    k=("blk.{i}.attn_k",),
    v=("blk.{i}.attn_v",),
    out=("blk.{i}.attn_output",),
    q_norm=("blk.{i}.attn_q_norm",),
    k_norm=("blk.{i}.attn_k_norm",),
    sinks=("blk.{i}.attn_sinks",),
    q_a=("blk.{i}.attn_q_a",),
    q_a_norm=("blk.{i}.attn_q_a_norm",),
    q_b=("blk.{i}.attn_q_b",),
    kv_a=("blk.{i}.attn_kv_a_mqa",),
    kv_a_norm=("blk.{i}.attn_kv_a_norm",),
    kv_b=("blk.{i}.attn_kv_b",),
    k_b=("blk.{i}.attn_k_b",),
    v_b=("blk.{i}.attn_v_b",),
    gate=("blk.{i}.ffn_gate",),
    up=("blk.{i}.ffn_up",),
    down=("blk.{i}.ffn_down",),
    router=("blk.{i}.ffn_gate_inp",),
    router_bias=("blk.{i}.ffn_gate_inp.bias",),
    correction_bias=("blk.{i}.exp_probs_b.bias", "blk.{i}.exp_probs_b"),
    expert_gate=("blk.{i}.ffn_gate.{e}",),
    expert_up=("blk.{i}.ffn_up.{e}",),
    expert_down=("blk.{i}.ffn_down.{e}",),
    packed_expert=(),
    stacked_gate_up=(),
    stacked_gate=("blk.{i}.ffn_gate_exps",),
    stacked_up=("blk.{i}.ffn_up_exps",),
    stacked_down=("blk.{i}.ffn_down_exps",),
    shared_gate=("blk.{i}.ffn_gate_shexp",),
    shared_up=("blk.{i}.ffn_up_shexp",),
    shared_gate_up=(),
    shared_down=("blk.{i}.ffn_down_shexp",),
    shared_expert_gate=("blk.{i}.ffn_gate_inp_shexp",),
)

# Buffers that old writers stored beside the weights; transformers recomputes them, and so do we.
RECOMPUTED_SUFFIXES = (".rotary_emb.inv_freq", ".self_attn.bias", ".self_attn.masked_bias")

# Every tensor of routed experts, scales and biases included, whichever way a Hugging Face checkpoint stores them.
_ROUTED = re.compile(r"model\.layers\.\d+\.(mlp\.experts\.|block_sparse_moe\.(experts|input_linear|output_linear)\.)")


def is_expert_tensor(name: str) -> bool:
    """Whether a tensor of a Hugging Face checkpoint belongs to routed experts (not to shared ones)."""
    return _ROUTED.match(name) is not None
