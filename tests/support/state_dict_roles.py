"""Compares assembled weights with a transformers model's state dict, role by role, bit for bit."""

from __future__ import annotations

from typing import Any

import torch

from batchgen_lite.models.load import LoadedModel
from batchgen_lite.models.weights import FFNWeights, GQAWeights, MLAWeights
from batchgen_lite.offload.checkpoint.matrices import read_dense
from batchgen_lite.offload.checkpoint.matrix import Matrix


class _Comparison:
    """Counts off the state dict's tensors while comparing, so that none is forgotten."""

    def __init__(self, loaded: LoadedModel, model: Any) -> None:
        self.checkpoint = loaded.checkpoint
        self.state: dict[str, torch.Tensor] = dict(model.state_dict())
        self.left = set(self.state)
        if model.config.tie_word_embeddings:
            self.left.discard("lm_head.weight")

    def take(self, name: str) -> torch.Tensor | None:
        self.left.discard(name)
        return self.state.get(name)

    def same(self, matrix: Matrix | None, expected: torch.Tensor | None, role: str) -> None:
        assert (matrix is None) == (expected is None), role
        if matrix is None or expected is None:
            return
        dense = read_dense(self.checkpoint, matrix)
        wanted = expected.reshape(1, -1) if expected.dim() == 1 else expected
        assert dense.shape == wanted.shape, f"{role}: {tuple(dense.shape)} for {tuple(wanted.shape)}"
        assert torch.equal(dense, wanted), f"{role} differs in {int((dense != wanted).sum())} elements"

    def ffn(self, weights: FFNWeights | None, prefix: str) -> None:
        """A dense or shared FFN with separate gate and up, or Granite's fused one."""
        assert weights is not None, prefix
        fused = self.take(f"{prefix}input_linear.weight")
        if fused is not None:
            self.same(weights.gate_up, fused, prefix)
            self.same(weights.down, self.take(f"{prefix}output_linear.weight"), prefix)
            return
        gate, up = self.take(f"{prefix}gate_proj.weight"), self.take(f"{prefix}up_proj.weight")
        assert gate is not None, prefix
        assert up is not None, prefix
        self.same(weights.gate_up, torch.cat([gate, up]), f"{prefix}gate_up")
        self.same(weights.down, self.take(f"{prefix}down_proj.weight"), f"{prefix}down")
        gate_bias, up_bias = self.take(f"{prefix}gate_proj.bias"), self.take(f"{prefix}up_proj.bias")
        joined = None if gate_bias is None or up_bias is None else torch.cat([gate_bias, up_bias])
        self.same(weights.gate_up_bias, joined, f"{prefix}gate_up bias")
        self.same(weights.down_bias, self.take(f"{prefix}down_proj.bias"), f"{prefix}down bias")

    def experts(self, weights: tuple[FFNWeights, ...], prefix: str, interleaved: bool) -> None:
        gate_up, down = self.take(f"{prefix}gate_up_proj"), self.take(f"{prefix}down_proj")
        gate_up_bias, down_bias = self.take(f"{prefix}gate_up_proj_bias"), self.take(f"{prefix}down_proj_bias")
        assert gate_up is not None, prefix
        assert down is not None, prefix
        assert len(weights) == gate_up.shape[0]
        for number, expert in enumerate(weights):
            role = f"{prefix}{number}"
            if interleaved:
                halves = torch.cat([gate_up[number, :, 0::2], gate_up[number, :, 1::2]], dim=1)
                self.same(expert.gate_up, halves.t(), role)
                self.same(expert.down, down[number].t(), role)
                assert gate_up_bias is not None
                assert down_bias is not None
                bias = torch.cat([gate_up_bias[number, 0::2], gate_up_bias[number, 1::2]])
                self.same(expert.gate_up_bias, bias, role)
                self.same(expert.down_bias, down_bias[number], role)
            else:
                self.same(expert.gate_up, gate_up[number], role)
                self.same(expert.down, down[number], role)
                self.same(expert.gate_up_bias, None, role)

    def grouped_attention(self, weights: GQAWeights, prefix: str) -> None:
        parts = [self.take(f"{prefix}{name}_proj.weight") for name in "qkv"]
        biases = [self.take(f"{prefix}{name}_proj.bias") for name in "qkv"]
        self.same(weights.qkv, torch.cat([part for part in parts if part is not None]), f"{prefix}qkv")
        joined = None if biases[0] is None else torch.cat([bias for bias in biases if bias is not None])
        self.same(weights.qkv_bias, joined, f"{prefix}qkv bias")
        self.same(weights.out, self.take(f"{prefix}o_proj.weight"), f"{prefix}out")
        self.same(weights.out_bias, self.take(f"{prefix}o_proj.bias"), f"{prefix}out bias")
        self.same(weights.q_norm, self.take(f"{prefix}q_norm.weight"), f"{prefix}q_norm")
        self.same(weights.k_norm, self.take(f"{prefix}k_norm.weight"), f"{prefix}k_norm")
        self.same(weights.sinks, self.take(f"{prefix}sinks"), f"{prefix}sinks")

    def latent_attention(self, weights: MLAWeights, prefix: str) -> None:
        for role, name in (
            ("q", "q_proj.weight"),
            ("q_a", "q_a_proj.weight"),
            ("q_bias", "q_a_proj.bias"),
            ("q_a_norm", "q_a_layernorm.weight"),
            ("q_b", "q_b_proj.weight"),
            ("kv_a", "kv_a_proj_with_mqa.weight"),
            ("kv_a_bias", "kv_a_proj_with_mqa.bias"),
            ("kv_a_norm", "kv_a_layernorm.weight"),
            ("kv_b", "kv_b_proj.weight"),
            ("out", "o_proj.weight"),
            ("out_bias", "o_proj.bias"),
        ):
            self.same(getattr(weights, role), self.take(prefix + name), prefix + name)


def check_weights(loaded: LoadedModel, model: Any) -> None:
    """Every matrix of ``loaded`` equals its part of ``model``'s state dict, and every part has its matrix."""
    compare = _Comparison(loaded, model)
    weights = loaded.weights
    assert len(weights.layers) == model.config.num_hidden_layers == loaded.spec.num_layers
    compare.same(weights.embedding, compare.take("model.embed_tokens.weight"), "embedding")
    compare.same(weights.head, model.lm_head.weight, "head")
    compare.take("lm_head.weight")
    compare.same(weights.final_norm, compare.take("model.norm.weight"), "final norm")
    for index, layer in enumerate(weights.layers):
        prefix = f"model.layers.{index}."
        compare.same(layer.attention_norm, compare.take(f"{prefix}input_layernorm.weight"), "attention norm")
        compare.same(layer.ffn_norm, compare.take(f"{prefix}post_attention_layernorm.weight"), "ffn norm")
        if isinstance(layer.attention, GQAWeights):
            compare.grouped_attention(layer.attention, f"{prefix}self_attn.")
        else:
            compare.latent_attention(layer.attention, f"{prefix}self_attn.")
        if layer.dense is not None:
            assert layer.router is None
            assert not layer.experts
            compare.ffn(layer.dense, f"{prefix}mlp.")
            continue
        moe = (
            f"{prefix}block_sparse_moe."
            if f"{prefix}block_sparse_moe.router.weight" in compare.state
            else f"{prefix}mlp."
        )
        router = "router" if f"{moe}router.weight" in compare.state else "gate"
        compare.same(layer.router, compare.take(f"{moe}{router}.weight"), "router")
        compare.same(layer.router_bias, compare.take(f"{moe}{router}.bias"), "router bias")
        compare.same(layer.correction_bias, compare.take(f"{moe}{router}.e_score_correction_bias"), "correction bias")
        compare.experts(layer.experts, f"{moe}experts.", interleaved=model.config.model_type == "gpt_oss")
        compare.same(layer.shared_gate, compare.take(f"{moe}shared_expert_gate.weight"), "shared gate")
        for shared in (f"{moe}shared_expert.", f"{moe}shared_experts.", f"{prefix}shared_mlp."):
            if any(name.startswith(shared) for name in compare.state):
                compare.ffn(layer.shared, shared)
                break
        else:
            assert layer.shared is None
    assert not compare.left, f"not compared: {sorted(compare.left)}"
