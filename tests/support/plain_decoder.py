"""A decoder as one would write it on a blackboard, driven by a ModelSpec: no streaming, pages, batches or kernels.

It shows that a spec and its weights say everything about a model, and is the second opinion where the engine and
transformers differ.
"""

from __future__ import annotations

import torch
from torch.nn.functional import gelu, silu

from batchgen_lite.kernels.router.reference import route
from batchgen_lite.models.load import LoadedModel
from batchgen_lite.models.rope import rope_tables
from batchgen_lite.models.spec import AttentionSpec, FFNSpec, LayerSpec, RopeSpec
from batchgen_lite.models.weights import FFNWeights, GQAWeights, LayerWeights, MLAWeights
from batchgen_lite.offload.checkpoint.matrices import read_dense
from batchgen_lite.offload.checkpoint.matrix import Matrix


class PlainDecoder:
    """``logits(ids)`` of one sequence, fp32 throughout."""

    def __init__(self, model: LoadedModel) -> None:
        self.model = model
        self.spec = model.spec

    def logits(self, ids: torch.Tensor) -> torch.Tensor:
        """fp32 [T, vocab] for token ids int64 [T]."""
        weights, spec = self.model.weights, self.spec
        hidden = self._read(weights.embedding)[ids] * spec.embedding_scale  # [T, H]
        for layer, part in zip(spec.layers, weights.layers, strict=True):
            normed = self._norm(hidden, part.attention_norm, spec.norm_eps)
            hidden = hidden + self._attention(normed, layer.attention, part) * spec.residual_scale
            normed = self._norm(hidden, part.ffn_norm, spec.norm_eps)
            hidden = hidden + self._feed_forward(normed, layer, part) * spec.residual_scale
        return self._linear(self._norm(hidden, weights.final_norm, spec.norm_eps), weights.head) * spec.logit_scale

    def _read(self, matrix: Matrix) -> torch.Tensor:
        return read_dense(self.model.checkpoint, matrix)

    def _linear(self, x: torch.Tensor, weight: Matrix, bias: Matrix | None = None) -> torch.Tensor:
        result = x @ self._read(weight).t()
        return result if bias is None else result + self._read(bias)

    def _norm(self, x: torch.Tensor, weight: Matrix, eps: float) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * self._read(weight)[0]

    def _attention(self, x: torch.Tensor, spec: AttentionSpec, part: LayerWeights) -> torch.Tensor:
        if isinstance(part.attention, MLAWeights):
            q, k, v = self._latent(x, spec, part.attention)
        else:
            q, k, v = self._grouped(x, spec, part.attention)
        scores = torch.einsum("qhd,khd->hqk", q, k) * spec.scale  # [heads, T, T]
        distance = torch.arange(len(x))[:, None] - torch.arange(len(x))[None, :]
        hidden = distance < 0 if spec.window is None else (distance < 0) | (distance >= spec.window)
        scores = scores.masked_fill(hidden, float("-inf"))
        if isinstance(part.attention, GQAWeights) and part.attention.sinks is not None:
            sinks = self._read(part.attention.sinks)[0][:, None, None].expand(-1, len(x), 1)
            scores = torch.cat([scores, sinks], dim=-1)
        weights = torch.softmax(scores, dim=-1)[:, :, : len(x)]
        merged = torch.einsum("hqk,khd->qhd", weights, v).reshape(len(x), -1)
        return self._linear(merged, part.attention.out, part.attention.out_bias)

    def _grouped(
        self, x: torch.Tensor, spec: AttentionSpec, part: GQAWeights
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        q_rows, k_rows = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        fused = self._linear(x, part.qkv, part.qkv_bias)
        q, k, v = fused.split([q_rows, k_rows, spec.num_kv_heads * spec.v_head_dim], dim=-1)
        if part.q_norm is not None and part.k_norm is not None:
            if spec.qk_norm == "head":
                q, k = q.reshape(-1, spec.head_dim), k.reshape(-1, spec.head_dim)
            q = self._norm(q, part.q_norm, self.spec.norm_eps)
            k = self._norm(k, part.k_norm, self.spec.norm_eps)
        q, k = q.reshape(len(x), spec.num_heads, -1), k.reshape(len(x), spec.num_kv_heads, -1)
        v = v.reshape(len(x), spec.num_kv_heads, spec.v_head_dim)
        if spec.rope is not None:
            q, k = _rotate(q, spec.rope), _rotate(k, spec.rope)
        group = spec.num_heads // spec.num_kv_heads
        return q, k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)

    def _latent(
        self, x: torch.Tensor, spec: AttentionSpec, part: MLAWeights
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        rope_dim, rank = spec.rope_head_dim or 0, spec.kv_lora_rank or 0
        nope = spec.head_dim - rope_dim
        if part.q is not None:
            q = self._linear(x, part.q, part.q_bias)
        else:
            assert part.q_a is not None
            assert part.q_a_norm is not None
            assert part.q_b is not None
            low = self._norm(self._linear(x, part.q_a, part.q_bias), part.q_a_norm, spec.latent_norm_eps)
            q = self._linear(low, part.q_b)
        q = q.view(len(x), spec.num_heads, spec.head_dim)
        latent, shared_key = self._linear(x, part.kv_a, part.kv_a_bias).split([rank, rope_dim], dim=-1)
        expanded = self._linear(self._norm(latent, part.kv_a_norm, spec.latent_norm_eps), part.kv_b)
        k, v = expanded.view(len(x), spec.num_heads, -1).split([nope, spec.v_head_dim], dim=-1)
        assert spec.rope is not None
        shared = _rotate(shared_key[:, None, :], spec.rope).expand(-1, spec.num_heads, -1)
        q = torch.cat([q[..., :nope], _rotate(q[..., nope:], spec.rope)], dim=-1)
        return q, torch.cat([k, shared], dim=-1), v

    def _feed_forward(self, x: torch.Tensor, spec: LayerSpec, part: LayerWeights) -> torch.Tensor:
        if spec.dense is not None:
            assert part.dense is not None
            return self._ffn(x, spec.dense, part.dense)
        assert spec.router is not None
        assert spec.expert is not None
        assert part.router is not None
        bias = None if part.correction_bias is None else self._read(part.correction_bias)[0]
        ids, weights = route(self._linear(x, part.router, part.router_bias), spec.router, bias)
        result = torch.zeros_like(x)
        for expert in ids.unique().tolist():
            rows, places = (ids == expert).nonzero(as_tuple=True)
            result[rows] += self._ffn(x[rows], spec.expert, part.experts[expert]) * weights[rows, places][:, None]
        if spec.shared is not None:
            assert part.shared is not None
            shared = self._ffn(x, spec.shared, part.shared)
            if spec.shared_gated:
                assert part.shared_gate is not None
                shared = torch.sigmoid(self._linear(x, part.shared_gate)) * shared
            result = result + shared
        return result

    def _ffn(self, x: torch.Tensor, spec: FFNSpec, part: FFNWeights) -> torch.Tensor:
        gate, up = self._linear(x, part.gate_up, part.gate_up_bias).chunk(2, dim=-1)
        if spec.activation == "swigluoai":
            gate, up = gate.clamp(max=spec.limit), up.clamp(-spec.limit, spec.limit)
            inner = gate * torch.sigmoid(spec.alpha * gate) * (up + 1)
        elif spec.activation == "silu":
            inner = silu(gate) * up
        else:
            inner = gelu(gate, approximate="tanh" if spec.activation == "gelu_tanh" else "none") * up
        return self._linear(inner, part.down, part.down_bias)


def _rotate(x: torch.Tensor, rope: RopeSpec) -> torch.Tensor:
    """Rotate the first ``rope.dim`` channels of x [T, heads, channels] by the position, the row number."""
    cos, sin = rope_tables(rope, torch.arange(len(x)))
    cos, sin = cos[:, None, :], sin[:, None, :]
    turned, kept = x[..., : rope.dim], x[..., rope.dim :]
    if rope.interleaved:
        first, second = turned[..., 0::2], turned[..., 1::2]
    else:
        first, second = turned.chunk(2, dim=-1)
    # Pairs come out as halves in both cases: queries and keys are permuted alike, so their products are the same.
    return torch.cat([first * cos - second * sin, second * cos + first * sin, kept], dim=-1)
