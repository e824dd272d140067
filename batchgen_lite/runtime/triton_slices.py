"""What a slice does between modules, on a card: norms, rotary embedding, KV writes, paged attention, by Triton kernels.

The residual stream is fp32; what goes into products and the KV cache has the card's 16-bit type (or fp32, for fp32
checkpoints). A module's result waits in ``add`` for the norm that follows it, so that one kernel does both.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from batchgen_lite.kernels.attention.paged_launch import (
    Int8Scales,
    PagedPlan,
    PageSpan,
    attention_config,
    paged_attention,
    plan_spans,
    workspace_elements,
)
from batchgen_lite.kernels.attention.quantise import quantise_write
from batchgen_lite.kernels.launch import upload, upload_together
from batchgen_lite.kernels.norm.rms import rms_norm
from batchgen_lite.kernels.rope.latent import latent_write
from batchgen_lite.kernels.rope.write import rope_write
from batchgen_lite.models.layers import Layer
from batchgen_lite.models.rope import rope_tables
from batchgen_lite.models.spec import RopeSpec
from batchgen_lite.offload.pages import PAGE_TOKENS
from batchgen_lite.runtime.slice_state import Slice, moved_to_front
from batchgen_lite.runtime.triton_activations import rows_at_once

if TYPE_CHECKING:
    from batchgen_lite.runtime.triton_operations import TritonOperations


class TritonSlice:
    """One slice of one sweep. Implements SliceOperations; index tables are uploaded once and used by every layer."""

    def __init__(self, sweep: TritonOperations, part: Slice) -> None:
        self._sweep, self._part, self._spec = sweep, part, sweep.spec
        self._hidden = sweep.hidden[part.start : part.stop]
        self._normed = sweep.normed[part.start : part.stop]
        self._narrowed = False
        self._tokens = part.stop - part.start
        self._device = self._hidden.device
        self._pending: torch.Tensor | None = None
        self._positions = torch.tensor(part.positions())  # int64 [n], on the host
        slots = torch.tensor(part.pages(PAGE_TOKENS)) * PAGE_TOKENS + self._positions % PAGE_TOKENS
        most = max(len(span.pages) for span in part.spans)
        pages = torch.zeros(len(part.spans), most, dtype=torch.int32)
        for row, span in enumerate(part.spans):
            pages[row, : len(span.pages)] = torch.tensor(span.pages, dtype=torch.int32)
        self._slots, self._block_table = upload_together([slots, pages], self._device)
        self._plans: dict[tuple[int, int, int], list[tuple[int, int, PagedPlan]]] = {}
        self._tables: dict[RopeSpec | None, tuple[torch.Tensor, torch.Tensor]] = {}

    # -- norms and residuals --------------------------------------------------------------------------------------

    def normed(self, weight: torch.Tensor) -> torch.Tensor:
        """See SliceOperations.normed."""
        if self._spec.norm_placement == "post":
            return self._normed.copy_(self._hidden)
        eps = self._spec.norm_eps
        if self._pending is None:
            rms_norm(self._hidden, weight, eps, self._normed).run()
        else:
            rms_norm(self._pending, weight, eps, self._normed, residual=self._hidden).run()
            self._pending = None
        return self._normed

    def add(self, delta: torch.Tensor, norm: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        """See SliceOperations.add. The modules have added ``bias`` already."""
        if self._spec.norm_placement == "post":
            rms_norm(delta, norm, self._spec.norm_eps, self._hidden, residual=self._hidden, post=True).run()
            return
        self._pending = delta if self._spec.residual_scale == 1.0 else delta.mul_(self._spec.residual_scale)

    def final(self) -> torch.Tensor:
        """See SliceOperations.final. The rows go to the front of the sweep's normed rows, which nobody needs now."""
        if self._pending is not None:
            self._hidden.add_(self._pending)
            self._pending = None
        out = self._final_rows()
        if len(out):
            chosen = self._hidden if self._narrowed else self._hidden.index_select(0, self._logit_rows())
            rms_norm(chosen, self._sweep.skeleton.final_norm, self._spec.norm_eps, out).run()
        return out

    def narrow(self, attended: torch.Tensor) -> torch.Tensor:
        """See SliceOperations.narrow. Nothing is pending: a norm came before the attention."""
        part = self._part
        rows, back = self._logit_rows(), part.start - part.logits_before
        self._hidden = moved_to_front(self._hidden, rows, back)
        self._normed = self._final_rows()
        self._narrowed = True
        return moved_to_front(attended, rows, back)

    def _final_rows(self) -> torch.Tensor:
        begin = self._part.logits_before
        return self._sweep.normed[begin : begin + len(self._part.logit_rows)]

    def _logit_rows(self) -> torch.Tensor:
        return upload(torch.tensor(self._part.logit_rows, dtype=torch.int64), self._device)

    # -- attention ------------------------------------------------------------------------------------------------

    def attention(self, layer: Layer, qkv: torch.Tensor) -> torch.Tensor:
        """See SliceOperations.attention."""
        attention, kv = layer.spec.attention, self._sweep.kv
        heads, depth, value_depth = attention.num_heads, attention.head_dim, attention.v_head_dim
        cos, sin = self._rope(attention.rope)
        query = self._own("query", heads * depth, self._sweep.query_dtype).view(-1, heads, depth)
        keys, values = kv.keys[layer.index], kv.values[layer.index]
        slots, scales = self._slots, kv.scales(layer.index)
        mark = self._sweep.workspace.mark()
        if scales is not None:  # written as computed to pages of the slice's own, then quantised from there
            rows, counting = self._staged(attention.num_kv_heads, depth, value_depth)
            keys, values, slots = _as_pages(rows[0]), _as_pages(rows[1]), counting
        rope_write(
            qkv, cos, sin, slots, query, keys, values,
            interleaved=attention.rope is not None and attention.rope.interleaved,
            q_weight=layer.q_norm, k_weight=layer.k_norm, eps=self._spec.norm_eps,
        ).run()  # fmt: skip
        if scales is not None:
            keys, values = kv.keys[layer.index], kv.values[layer.index]
            for staged, pages, own in zip(rows, (keys, values), scales, strict=True):
                quantise_write(staged[: self._tokens], pages, own, self._slots).run()
            self._sweep.workspace.rewind(mark)
        out = self._own("attended", heads * value_depth, self._sweep.dtype)
        self._attend(
            layer, query, keys, values, heads // attention.num_kv_heads, out.view(-1, heads, value_depth), scales
        )
        return out

    def _staged(self, heads: int, depth: int, value_depth: int) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Memory for this slice's keys and values as computed, [rows, heads, depth] in whole pages, and the numbers of
        their rows int64 [n]."""
        rows = -(-self._tokens // PAGE_TOKENS) * PAGE_TOKENS
        dtype = self._sweep.dtype
        staged = [self._sweep.take((rows, heads, width), dtype) for width in (depth, value_depth) if width]
        counting = upload(torch.arange(self._tokens), self._device)
        return staged, counting

    # -- latent attention -----------------------------------------------------------------------------------------

    def query_latent(self, layer: Layer, latent: torch.Tensor) -> torch.Tensor:
        """See SliceOperations.query_latent."""
        out = self._own("query latent", latent.shape[1], self._sweep.dtype)
        rms_norm(latent, layer.latent_norms["q_a"], layer.spec.attention.latent_norm_eps, out).run()
        return out

    def latent_heads(self, layer: Layer, query: torch.Tensor, latent: torch.Tensor) -> torch.Tensor:
        """See SliceOperations.latent_heads: here whole queries are "absorb_k"'s input, which leaves their rotary part
        out, so that nothing is copied."""
        attention, kv = layer.spec.attention, self._sweep.kv
        rank, rope = attention.kv_lora_rank, attention.rope_head_dim
        assert rank is not None
        assert rope is not None
        heads = attention.num_heads
        cos, sin = self._rope(attention.rope)
        rotary = self._own("rotary", heads * rope, self._sweep.query_dtype).view(-1, heads, rope)
        turned = query.view(-1, heads, attention.head_dim)[:, :, attention.head_dim - rope :]
        keys, slots, scales = kv.keys[layer.index], self._slots, kv.scales(layer.index)
        mark = self._sweep.workspace.mark()
        if scales is not None:
            rows, slots = self._staged(1, rank + rope, 0)
            keys = _as_pages(rows[0])
        latent_write(
            latent, turned, layer.latent_norms["kv_a"], cos, sin, slots, rotary, keys, attention.latent_norm_eps,
            interleaved=attention.rope is not None and attention.rope.interleaved,
        ).run()  # fmt: skip
        if scales is not None:
            quantise_write(rows[0][: self._tokens], kv.keys[layer.index], scales[0], self._slots).run()
            self._sweep.workspace.rewind(mark)
        return query

    def latent_attention(self, layer: Layer, absorbed: torch.Tensor) -> torch.Tensor:
        """See SliceOperations.latent_attention. ``absorbed`` has room for the rotary part behind each head."""
        attention, kv = layer.spec.attention, self._sweep.kv
        rank, rope = attention.kv_lora_rank, attention.rope_head_dim
        assert rank is not None
        assert rope is not None
        heads = attention.num_heads
        query = absorbed.view(-1, heads, rank + rope)
        rotary = self._own("rotary", heads * rope, self._sweep.query_dtype).view(-1, heads, rope)
        query[:, :, rank:].copy_(rotary)
        if query.dtype != self._sweep.query_dtype:
            query = query.to(self._sweep.query_dtype)
        out = self._own("summed", heads * rank, self._sweep.dtype)
        self._attend(layer, query, kv.keys[layer.index], None, heads, out.view(-1, heads, rank), kv.scales(layer.index))
        return out

    def latent_values(self, layer: Layer, values: torch.Tensor) -> torch.Tensor:
        """See SliceOperations.latent_values."""
        return values

    # -- shared by both -------------------------------------------------------------------------------------------

    def _attend(
        self,
        layer: Layer,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor | None,
        group: int,
        out: torch.Tensor,
        scales: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> None:
        """As many rows at a time as their partial results have room; it is free again behind each merge, as all is
        queued on one stream."""
        attention, workspace = layer.spec.attention, self._sweep.workspace
        heads, value_depth = query.shape[1], out.shape[2]
        for first, end, plan in self._plan(keys.dtype, query.shape[2], group, heads * (value_depth + 2)):
            mark = workspace.mark()
            attend, merge = paged_attention(
                query[first:end], keys, values, self._block_table, plan, out[first:end],
                workspace.take(workspace_elements(plan, heads, value_depth)),
                scale=attention.scale, window=attention.window, sinks=layer.sinks,
                int8=None if scales is None else Int8Scales(*scales),
            )  # fmt: skip
            attend.run()
            merge.run()
            workspace.rewind(mark)

    def _plan(self, kv_dtype: torch.dtype, depth: int, group: int, partial: int) -> list[tuple[int, int, PagedPlan]]:
        """(first row, end row, plan) of the parts in which this slice attends. ``partial``: fp32 elements that a row's
        partial result takes per split."""
        key = (depth, group, partial)
        if key not in self._plans:
            config = attention_config(self._device, kv_dtype, depth, group)
            longest = max(span.start + span.count for span in self._part.spans)
            rows = rows_at_once(partial, -(-longest // (PAGE_TOKENS * config.split)))
            self._plans[key] = [
                (first, end, plan_spans(self._spans(first, end), end - first, group, config, self._device))
                for first in range(0, self._tokens, rows)
                for end in (min(first + rows, self._tokens),)
            ]
        return self._plans[key]

    def _spans(self, first: int, end: int) -> list[PageSpan]:
        """What of the slice's spans lies in its rows [first, end)."""
        found = []
        for number, span in enumerate(self._part.spans):
            begin, stop = max(span.row, first), min(span.row + span.count, end)
            if begin < stop:
                found.append(PageSpan(number, span.start + begin - span.row, begin - first, stop - begin))
        return found

    def _rope(self, rope: RopeSpec | None) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin fp32 [n, rot / 2], made on the host so that every device has the same; of width 0 for none."""
        if rope not in self._tables:
            if rope is None:
                tables = (torch.zeros(self._tokens, 0), torch.zeros(self._tokens, 0))
            else:
                tables = rope_tables(rope, self._positions)
            cos, sin = upload_together(tables, self._device)
            self._tables[rope] = cos, sin
        return self._tables[rope]

    def _own(self, name: str, width: int, dtype: torch.dtype) -> torch.Tensor:
        """This slice's rows [n, width] of the activation ``name``, which all slices share until the half ends."""
        return self._sweep.shared(name, width, dtype)[self._part.start : self._part.stop]


def _as_pages(rows: torch.Tensor) -> torch.Tensor:
    """Rows [pages * 64, heads, depth] as pages [pages, heads, 64, depth]."""
    return rows.view(-1, PAGE_TOKENS, *rows.shape[1:]).transpose(1, 2)
