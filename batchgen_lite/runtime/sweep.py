"""One sweep: every chosen sequence moves forward by one pass through all layers.

    plan ──> slices ── attention of layer L, slice by slice ──┐
                ^                                             │ each yields its hidden states
                │                                             v
                └──── resume with their rows <── one batch <─ combine
                                                  │
                       tiles of the module, in order, each used once: widen, multiply, next

All slices run until they stand at the same module; then the module runs once on all their rows, tile by tile as the
weights arrive, and all slices resume. Between two modules nothing but the slices' own work happens, while the stream
(offload/stream.py) reads ahead. The head and the sampler end the sweep.

A sweep is a transaction. It writes KV only behind each sequence's committed length and touches nothing else that
outlives it, so it may end anywhere with an exception (a stop, a read error, too little memory) and nothing has
happened. The caller commits when ``run`` has returned.

Experts add their results to a token in ascending expert number, whatever order they were read in and whichever are
resident; with the row padding of the GEMMs this is what makes a row's bits independent of the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from batchgen_lite.kernels.attention.reference import SpanRows
from batchgen_lite.kernels.experts.activation import sigmoid
from batchgen_lite.kernels.experts.reference import down, gate_up, linear, stage_elements, stage_rows, widened
from batchgen_lite.kernels.router.reference import route
from batchgen_lite.models.layers import Layer, Skeleton
from batchgen_lite.models.spec import FFNSpec, ModelSpec
from batchgen_lite.offload.embedding import EmbeddingTable
from batchgen_lite.offload.kv import KVPool
from batchgen_lite.offload.pages import PAGE_TOKENS
from batchgen_lite.offload.stream import WeightStream
from batchgen_lite.offload.tiles import SHARED_EXPERT, Module, Tile
from batchgen_lite.offload.workspace import Workspace
from batchgen_lite.runtime.padding import padded
from batchgen_lite.runtime.primitives import ModuleCall, combine
from batchgen_lite.runtime.slice_state import Rows, Slice, Steps
from batchgen_lite.runtime.slices import run_slice

HALVES = ("out", "experts", "dense")
"""Modules that end a half of a layer: their results have been added to the hidden states, nothing else is live."""

Sampled = Callable[[torch.Tensor, int], None]
"""Called with logits fp32 [n, vocab] and the number, within the sweep's logit rows, of the first of them."""


@dataclass(frozen=True, slots=True)
class SweepSpan:
    """``tokens`` at positions [start, start + len(tokens)) of a sequence whose pages from 0 on are ``pages``."""

    tokens: Sequence[int]
    start: int
    pages: Sequence[int]
    wants_logits: bool


class Sweeper:
    """Runs sweeps of one model on the CPU. Owned by the engine thread."""

    def __init__(
        self,
        spec: ModelSpec,
        skeleton: Skeleton,
        stream: WeightStream,
        embedding: EmbeddingTable,
        kv: KVPool,
        workspace: Workspace,
        slice_tokens: int,
    ) -> None:
        self.spec = spec
        self.skeleton = skeleton
        self.stream = stream
        self.embedding = embedding
        self.kv = kv
        self.workspace = workspace
        self.slice_tokens = slice_tokens
        self._modules = {(module.kind, module.layer): module for module in stream.modules}
        self._scratch = torch.empty(0)
        self._attended_width = max(
            layer.spec.attention.num_heads * layer.spec.attention.v_head_dim for layer in skeleton.layers
        )

    def run(self, spans: Sequence[SweepSpan], sample: Sampled) -> None:
        """Compute ``spans`` and hand the logits to ``sample``, in span order.

        Raises SweepAborted after the stream's ``abort``, StorageError when a read failed, MemoryError when the spans
        need more activations than the workspace holds. The stream has to be ``reset`` after any exception.
        """
        tokens = sum(len(span.tokens) for span in spans)
        self.workspace.rewind(0)
        self.stream.begin_sweep(tokens)
        self._scratch = self.workspace.take(self._scratch_elements())
        rows = Rows(
            hidden=self.workspace.take(padded(tokens), self.spec.hidden_size),
            normed=self.workspace.take(padded(tokens), self.spec.hidden_size),
            attended=self.workspace.take(padded(tokens), self._attended_width),
        )
        self._embed(spans, rows.hidden)
        slices = self._slices(spans)
        steps = [run_slice(self.spec, self.skeleton, part, rows, self.kv) for part in slices]
        calls = [next(step) for step in steps]
        mark = self.workspace.mark()
        while calls[0].kind != "head":
            finished = calls[0].kind
            calls = _resume(steps, calls, self._run_module(calls, padded(tokens)))
            if finished in HALVES:
                self.workspace.rewind(mark)
        self._head(calls, sample)

    # -- before the layers ----------------------------------------------------------------------------------------

    def _embed(self, spans: Sequence[SweepSpan], hidden: torch.Tensor) -> None:
        ids = [token for span in spans for token in span.tokens]
        self.embedding.rows(ids, hidden[: len(ids)])
        if self.spec.embedding_scale != 1.0:
            hidden[: len(ids)].mul_(self.spec.embedding_scale)
        hidden[len(ids) :].zero_()

    def _slices(self, spans: Sequence[SweepSpan]) -> list[Slice]:
        """Consecutive spans up to ``slice_tokens`` tokens; a longer span is a slice of its own."""
        groups: list[list[SweepSpan]] = [[]]
        size = 0
        for span in spans:
            if groups[-1] and size + len(span.tokens) > self.slice_tokens:
                groups.append([])
                size = 0
            groups[-1].append(span)
            size += len(span.tokens)
        slices = []
        start = 0
        for group in groups:
            part = _make_slice(group, start)
            slices.append(part)
            start = part.stop
        return slices

    # -- modules --------------------------------------------------------------------------------------------------

    def _run_module(self, calls: Sequence[ModuleCall], rows: int) -> torch.Tensor:
        """One module on all slices' rows; returns [rows, width], possibly a transposed view."""
        kind, layer = calls[0].kind, calls[0].layer
        x = combine(calls, rows)
        if kind == "experts":
            return self._experts(self.skeleton.layers[layer], x, sum(call.x.shape[0] for call in calls))
        if kind == "dense":
            spec = self.skeleton.layers[layer].spec.dense
            assert spec is not None
            return self._dense(self._modules["dense", layer], spec, self.skeleton.layers[layer], x)
        if kind in ("absorb_k", "absorb_v"):
            return self._per_head(self._modules[kind, layer], x, transposed=kind == "absorb_k").t()
        return self._linear(self._modules[kind, layer], x).t()

    def _linear(self, module: Module, x: torch.Tensor) -> torch.Tensor:
        """W x^T for a module of one matrix: [matrix rows, T]."""
        out = self.workspace.take(module.tiles[-1].stop, x.shape[0])
        for tile, parts in self.stream.tiles(module):
            linear(tile.matrix, parts, (tile.start, tile.stop), x, out, self._scratch)
        return out

    def _per_head(self, module: Module, x: torch.Tensor, *, transposed: bool) -> torch.Tensor:
        """Each head's own matrix on its own columns of ``x`` [T, heads * width]; [heads * result, T].

        The module's matrix holds heads of ``row_step`` rows. ``transposed`` multiplies with W(h)^T.
        """
        matrix = module.tiles[0].matrix
        rows, cols = matrix.row_step, matrix.cols
        size, width = (cols, rows) if transposed else (rows, cols)
        out = self.workspace.take(matrix.rows // rows * size, x.shape[0])
        columns = x.t()
        for tile, parts in self.stream.tiles(module):
            for start, stop, weights in widened(tile.matrix, parts, (tile.start, tile.stop), self._scratch):
                for head in range(start // rows, stop // rows):
                    own = weights[head * rows - start : (head + 1) * rows - start]
                    own = own.t() if transposed else own
                    at = head * width
                    torch.mm(own, columns[at : at + width], out=out[head * size : (head + 1) * size])
        return out

    def _dense(self, module: Module, spec: FFNSpec, layer: Layer, x: torch.Tensor) -> torch.Tensor:
        ffn = _FFN(self, layer, spec, x)
        for tile, parts in self.stream.tiles(module):
            ffn.feed(tile, parts)
        return ffn.out.t()

    def _experts(self, layer: Layer, x: torch.Tensor, tokens: int) -> torch.Tensor:
        """Route all tokens at once, then run each chosen expert on its tokens as its weights arrive."""
        spec = layer.spec.router
        assert spec is not None
        assert layer.spec.expert is not None
        logits = self._linear(self._modules["router", layer.index], x)[:, :tokens].t().contiguous()  # [T, E]
        if layer.router_bias is not None:
            logits.add_(layer.router_bias)
        ids, weights = route(logits, spec, layer.correction_bias)
        order = torch.argsort(ids.flatten(), stable=True)  # assignments grouped by expert, tokens ascending
        counts = torch.bincount(ids.flatten(), minlength=spec.num_experts)
        ends = counts.cumsum(0).tolist()
        token_of = order // spec.top_k
        weight_of = weights.flatten()[order]
        delta = self.workspace.take(x.shape[0], self.spec.hidden_size).zero_()
        mark = self.workspace.mark()
        current, ffn = None, None
        for tile, parts in self.stream.tiles(self._modules["experts", layer.index], counts):
            if tile.expert != current:
                if ffn is not None:
                    ffn.add_to(delta)
                self.workspace.rewind(mark)
                current = tile.expert
                if current == SHARED_EXPERT:
                    assert layer.spec.shared is not None
                    ffn = _FFN(self, layer, layer.spec.shared, x, gate=self._shared_gate(layer, x))
                else:
                    begin = ends[current] - int(counts[current])
                    chosen = slice(begin, ends[current])
                    ffn = _FFN(self, layer, layer.spec.expert, x, current, token_of[chosen], weight_of[chosen])
            assert ffn is not None
            ffn.feed(tile, parts)
        if ffn is not None:
            ffn.add_to(delta)
        return delta

    def _shared_gate(self, layer: Layer, x: torch.Tensor) -> torch.Tensor | None:
        """sigmoid(gate . x) per token [T, 1], or None where the shared expert is not gated."""
        if not layer.spec.shared_gated:
            return None
        assert layer.shared_gate is not None
        return sigmoid((x * layer.shared_gate).sum(-1, keepdim=True))

    # -- after the layers -----------------------------------------------------------------------------------------

    def _head(self, calls: Sequence[ModuleCall], sample: Sampled) -> None:
        """Logits of the rows that want them, then the sampler. The layers' workspace is free by now."""
        final = torch.cat([call.x for call in calls])
        module = self._modules["head", -1]
        if not len(final):
            for _ in self.stream.tiles(module):  # keep the stream in step; nothing to compute
                pass
            return
        self.workspace.rewind(0)
        self._scratch = self.workspace.take(self._scratch_elements())
        x = self.workspace.take(padded(len(final)), self.spec.hidden_size).zero_()
        x[: len(final)] = final
        logits = self.workspace.take(len(final), self.spec.vocab_size)
        stage = self.workspace.take(min(self.spec.vocab_size, stage_rows(module.tiles[0].matrix)), x.shape[0])
        for tile, parts in self.stream.tiles(module):
            for start, stop, weights in widened(tile.matrix, parts, (tile.start, tile.stop), self._scratch):
                block = stage[: stop - start]
                torch.mm(weights, x.t(), out=block)
                logits[:, start:stop] = block[:, : len(final)].t()
        if self.skeleton.head_bias is not None:
            logits.add_(self.skeleton.head_bias)
        if self.spec.logit_scale != 1.0:
            logits.mul_(self.spec.logit_scale)
        sample(logits, 0)

    def _scratch_elements(self) -> int:
        return max(stage_elements(tile.matrix) for module in self.stream.modules for tile in module.tiles)


class _FFN:
    """One gated feed-forward network fed with its tiles in order, on some tokens of a batch."""

    def __init__(
        self,
        sweeper: Sweeper,
        layer: Layer,
        spec: FFNSpec,
        x: torch.Tensor,
        expert: int = SHARED_EXPERT,
        tokens: torch.Tensor | None = None,
        weights: torch.Tensor | None = None,
        gate: torch.Tensor | None = None,
    ) -> None:
        """``tokens`` int64 [n]: rows of ``x`` that use it, None = all; scaled by ``weights`` [n] or ``gate`` [T, 1]."""
        self.spec = spec
        self.tokens, self.weights, self.gate = tokens, weights, gate
        self.biases = layer.ffns[expert]
        self._workspace, self._scratch = sweeper.workspace, sweeper._scratch
        if tokens is None:
            self.x = x
        else:
            columns = padded(len(tokens))
            index = torch.zeros(columns, dtype=torch.int64)
            index[: len(tokens)] = tokens
            self.x = torch.index_select(x, 0, index, out=self._workspace.take(columns, x.shape[1]))
        self.activated = self._workspace.take(spec.intermediate, self.x.shape[0])
        self.out = self._workspace.take(x.shape[1], self.x.shape[0])
        self._stage: torch.Tensor | None = None

    def feed(self, tile: Tile, parts: Sequence[torch.Tensor]) -> None:
        span = (tile.start, tile.stop)
        if tile.role == "gate_up":
            if self._stage is None:
                rows = min(tile.matrix.rows, stage_rows(tile.matrix))
                self._stage = self._workspace.take(2 * rows * self.x.shape[0])
            gate_up(
                tile.matrix,
                parts,
                span,
                self.x,
                self.spec,
                self.biases.gate_up,
                self.activated,
                self._stage,
                self._scratch,
            )
        else:
            down(tile.matrix, parts, span, self.activated, self.biases.down, self.out, self._scratch)

    def add_to(self, delta: torch.Tensor) -> None:
        """Add the result to the rows of ``delta`` [T, hidden] that it belongs to."""
        if self.tokens is None:
            result = self.out.t()
            delta.add_(result if self.gate is None else result * self.gate)
            return
        assert self.weights is not None
        n = len(self.tokens)
        result = torch.mul(
            self.out[:, :n].t(), self.weights[:, None], out=self._workspace.take(n, self.out.shape[0])
        )  # [n, hidden]
        delta.index_add_(0, self.tokens, result)


def _resume(steps: Sequence[Steps], calls: Sequence[ModuleCall], result: torch.Tensor) -> list[ModuleCall]:
    """Send every slice its rows of the combined result; returns where each parks next."""
    following = []
    at = 0
    for step, call in zip(steps, calls, strict=True):
        count = call.x.shape[0]
        following.append(step.send(result[at : at + count]))
        at += count
    return following


def _make_slice(spans: Sequence[SweepSpan], start: int) -> Slice:
    rows: list[SpanRows] = []
    positions: list[int] = []
    pages: list[int] = []
    logit_rows: list[int] = []
    at = 0
    for span in spans:
        count = len(span.tokens)
        rows.append(SpanRows(at, span.start, count, span.pages))
        places = range(span.start, span.start + count)
        positions.extend(places)
        pages.extend(span.pages[place // PAGE_TOKENS] for place in places)
        at += count
        if span.wants_logits:
            logit_rows.append(at - 1)
    position = torch.tensor(positions)
    return Slice(
        start=start,
        stop=start + at,
        spans=rows,
        positions=position,
        pages=torch.tensor(pages),
        slots=position % PAGE_TOKENS,
        logit_rows=torch.tensor(logit_rows, dtype=torch.int64),
    )
