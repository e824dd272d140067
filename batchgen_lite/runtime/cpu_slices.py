"""What a slice does between modules, on the CPU: norms, rotary embedding, KV writes, attention over pages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from batchgen_lite.kernels.attention.reference import AttentionPlan, paged_attention, plan_attention
from batchgen_lite.kernels.norm.reference import rms_norm
from batchgen_lite.kernels.rope.reference import rotate_
from batchgen_lite.models.layers import Layer
from batchgen_lite.models.rope import rope_tables
from batchgen_lite.models.spec import AttentionSpec
from batchgen_lite.offload.pages import PAGE_TOKENS
from batchgen_lite.runtime.slice_state import Slice, moved_to_front

if TYPE_CHECKING:
    from batchgen_lite.runtime.cpu_operations import CpuOperations


class CpuSlice:
    """One slice of one sweep. Implements SliceOperations; index tensors are made once and used by every layer."""

    def __init__(self, sweep: CpuOperations, part: Slice) -> None:
        self._sweep, self._part, self._spec = sweep, part, sweep.spec
        self._hidden = sweep.hidden[part.start : part.stop]
        self._normed = sweep.normed[part.start : part.stop]
        self._narrowed = False
        table = sweep.placement.table
        positions = torch.tensor(part.positions())  # int64 [n]
        self._pages = table(torch.tensor(part.pages(PAGE_TOKENS)))  # int64 [n]
        self._slots = table(positions % PAGE_TOKENS)  # int64 [n]
        self._logit_rows = table(torch.tensor(part.logit_rows, dtype=torch.int64))  # int64 [m]
        attentions = [layer.spec.attention for layer in sweep.skeleton.layers]
        self._tables = {  # (cos, sin) fp32 [n, rot / 2] each
            rope: tuple(table(half) for half in rope_tables(rope, positions))
            for rope in dict.fromkeys(attention.rope for attention in attentions)
            if rope is not None
        }
        self._plans = {
            key: _placed(plan_attention(part.spans, *key), table)
            for key in dict.fromkeys(map(_attention_key, attentions))
        }

    # -- norms and residuals --------------------------------------------------------------------------------------

    def normed(self, weight: torch.Tensor) -> torch.Tensor:
        """See SliceOperations.normed."""
        if self._spec.norm_placement == "post":
            return self._normed.copy_(self._hidden)
        return rms_norm(self._hidden, weight, self._spec.norm_eps, self._normed)

    def add(self, delta: torch.Tensor, norm: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        """See SliceOperations.add."""
        if bias is not None:
            delta = delta + bias
        if self._spec.norm_placement == "post":
            delta = rms_norm(delta.contiguous(), norm, self._spec.norm_eps)
        # Scaled in a step of its own: add_ with alpha is fused on some elements only, by where they lie.
        self._hidden.add_(delta if self._spec.residual_scale == 1.0 else delta * self._spec.residual_scale)

    def narrow(self, attended: torch.Tensor) -> torch.Tensor:
        """See SliceOperations.narrow."""
        part = self._part
        back = part.start - part.logits_before
        self._hidden = moved_to_front(self._hidden, self._logit_rows, back)
        self._normed = self._final_rows()
        self._narrowed = True
        return moved_to_front(attended, self._logit_rows, back)

    def final(self) -> torch.Tensor:
        """See SliceOperations.final. The rows go to the front of the sweep's normed rows, which nobody needs now."""
        out = self._final_rows()
        if len(out):
            rows = self._hidden if self._narrowed else self._hidden[self._logit_rows]
            rms_norm(rows, self._sweep.skeleton.final_norm, self._spec.norm_eps, out)
        return out

    def _final_rows(self) -> torch.Tensor:
        begin = self._part.logits_before
        return self._sweep.normed[begin : begin + len(self._part.logit_rows)]

    # -- attention ------------------------------------------------------------------------------------------------

    def attention(self, layer: Layer, qkv: torch.Tensor) -> torch.Tensor:
        """See SliceOperations.attention."""
        attention, kv = layer.spec.attention, self._sweep.kv
        query, key, value = self._heads(layer, qkv)
        self._rotate(attention, query, key)
        kv.write(layer.index, self._pages, self._slots, key, value)
        out = self._own("attended", attention.num_heads * attention.v_head_dim)
        paged_attention(
            query,
            kv.keys[layer.index],
            kv.values[layer.index],
            self._plans[_attention_key(attention)],
            scale=attention.scale,
            window=attention.window,
            sinks=layer.sinks,
            scales=kv.scales(layer.index),
            out=out.view(-1, attention.num_heads, attention.v_head_dim),
        )
        return out

    def _heads(self, layer: Layer, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Split fused projections into normed query [n, Hq, D], key [n, Hkv, D] and value [n, Hkv, Dv], contiguous."""
        attention, eps = layer.spec.attention, self._spec.norm_eps
        widths = [
            attention.num_heads * attention.head_dim,
            attention.num_kv_heads * attention.head_dim,
            attention.num_kv_heads * attention.v_head_dim,
        ]
        query, key, value = (part.contiguous() for part in torch.split(qkv, widths, dim=1))
        bias = layer.projection_bias.get("qkv")
        if bias is not None:
            for tensor, part in zip((query, key, value), torch.split(bias, widths), strict=True):
                tensor.add_(part)
        if attention.qk_norm == "full":
            query, key = (rms_norm(t, w, eps) for t, w in ((query, layer.q_norm), (key, layer.k_norm)))  # type: ignore[arg-type]
        query = query.view(-1, attention.num_heads, attention.head_dim)
        key = key.view(-1, attention.num_kv_heads, attention.head_dim)
        if attention.qk_norm == "head":
            query, key = (rms_norm(t, w, eps) for t, w in ((query, layer.q_norm), (key, layer.k_norm)))  # type: ignore[arg-type]
        return query, key, value.view(-1, attention.num_kv_heads, attention.v_head_dim)

    # -- latent attention -----------------------------------------------------------------------------------------

    def query_latent(self, layer: Layer, latent: torch.Tensor) -> torch.Tensor:
        """See SliceOperations.query_latent."""
        latent = latent.contiguous()
        if "q_a" in layer.projection_bias:
            latent.add_(layer.projection_bias["q_a"])
        out = self._own("query latent", latent.shape[1])
        return rms_norm(latent, layer.latent_norms["q_a"], layer.spec.attention.latent_norm_eps, out)

    def latent_heads(self, layer: Layer, query: torch.Tensor, latent: torch.Tensor) -> torch.Tensor:
        """See SliceOperations.latent_heads."""
        attention = layer.spec.attention
        rank, rope, heads, nope = _latent_sizes(attention)
        query = query + layer.projection_bias["q"] if "q" in layer.projection_bias else query.contiguous()
        query = query.reshape(-1, heads, attention.head_dim)
        latent = latent.contiguous()
        if "kv_a" in layer.projection_bias:
            latent.add_(layer.projection_bias["kv_a"])
        compressed = rms_norm(latent[:, :rank].contiguous(), layer.latent_norms["kv_a"], attention.latent_norm_eps)
        shared = latent[:, None, rank:].contiguous()  # [n, 1, rope]
        rotary = self._own("rotary", heads * rope).view(-1, heads, rope).copy_(query[:, :, nope:])
        self._rotate(attention, shared, rotary)
        key = torch.cat((compressed, shared[:, 0]), dim=1).unsqueeze(1)  # [n, 1, rank + rope]
        self._sweep.kv.write(layer.index, self._pages, self._slots, key, key[..., :0])
        plain = self._own("plain", heads * nope)
        plain.view(-1, heads, nope).copy_(query[:, :, :nope])
        return plain

    def latent_attention(self, layer: Layer, absorbed: torch.Tensor) -> torch.Tensor:
        """See SliceOperations.latent_attention."""
        attention = layer.spec.attention
        rank, rope, heads, _ = _latent_sizes(attention)
        rotary = self._own("rotary", heads * rope).view(-1, heads, rope)
        query = torch.cat((absorbed.reshape(-1, heads, rank), rotary), dim=2)
        kv = self._sweep.kv
        keys = kv.keys[layer.index]
        summed = self._own("summed", heads * rank)
        paged_attention(
            query,
            keys,
            keys[..., :rank],
            self._plans[_attention_key(attention)],
            scale=attention.scale,
            window=attention.window,
            scales=kv.scales(layer.index),
            out=summed.view(-1, heads, rank),
        )
        return summed

    def latent_values(self, layer: Layer, values: torch.Tensor) -> torch.Tensor:
        """See SliceOperations.latent_values."""
        return self._own("attended", values.shape[1]).copy_(values)

    # -- shared by both -------------------------------------------------------------------------------------------

    def _rotate(self, attention: AttentionSpec, *heads: torch.Tensor) -> None:
        if attention.rope is None:
            return
        cos, sin = self._tables[attention.rope]
        for tensor in heads:
            rotate_(tensor, cos, sin, attention.rope.interleaved)

    def _own(self, name: str, width: int) -> torch.Tensor:
        """This slice's rows [n, width] of the activation ``name``, which all slices share until the half ends."""
        return self._sweep.shared(name, width)[self._part.start : self._part.stop]


def _attention_key(attention: AttentionSpec) -> tuple[int, int, int | None]:
    """What a plan depends on: query heads that share a KV head, KV heads, window. A latent is one head to all."""
    kv_heads = 1 if attention.is_mla else attention.num_kv_heads
    return attention.num_heads // kv_heads, kv_heads, attention.window


def _placed(plan: AttentionPlan, table: Callable[[torch.Tensor], torch.Tensor]) -> AttentionPlan:
    """``plan`` with its index tensors given through ``table``."""
    return AttentionPlan(
        tuple(
            replace(
                group,
                queries=table(group.queries),
                position=table(group.position),
                live=table(group.live),
                pages=tuple(table(pages) for pages in group.pages),
                first_page=table(group.first_page),
            )
            for group in plan.groups
        ),
        table(plan.order),
    )


def _latent_sizes(attention: AttentionSpec) -> tuple[int, int, int, int]:
    """rank, rotary channels, query heads, plain channels of a head."""
    rank, rope = attention.kv_lora_rank, attention.rope_head_dim
    assert rank is not None
    assert rope is not None
    return rank, rope, attention.num_heads, attention.head_dim - rope
