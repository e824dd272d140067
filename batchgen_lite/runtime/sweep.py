"""One sweep: every chosen sequence moves forward by one pass through all layers.

    plan ──> slices ── attention of layer L, slice by slice ──┐
                ^                                             │ each yields its hidden states
                │                                             v
                └──── resume with their rows <── one batch <─ combine
                                                  │
                       tiles of the module, in order, each used once: widen, multiply, next

All slices run until they stand at the same module; then the module runs once on all their rows, tile by tile as the
weights arrive, and all slices resume. Between two modules nothing but the slices' own work happens, while the stream
(offload/stream.py) reads ahead. The head and the sampler end the sweep. What is computed, and where, is the device's
Operations' affair (runtime/operations.py); this file knows the order only.

A sweep is a transaction. It writes KV only behind each sequence's committed length and touches nothing else that
outlives it, so it may end anywhere with an exception (a stop, a read error, too little memory) and nothing has
happened. The caller commits when ``run`` has returned.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from batchgen_lite.kernels.attention.reference import SpanRows
from batchgen_lite.kernels.padding import padded
from batchgen_lite.offload.pages import pages_for
from batchgen_lite.offload.stream import WeightStream
from batchgen_lite.runtime.operations import Operations
from batchgen_lite.runtime.primitives import ModuleCall, combine
from batchgen_lite.runtime.slice_state import Slice, Steps
from batchgen_lite.runtime.slices import run_slice
from batchgen_lite.trace.recorder import SILENT, Recorder

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
    """Runs sweeps of one model. Owned by the engine thread."""

    def __init__(
        self,
        operations: Operations,
        stream: WeightStream,
        slice_tokens: int,
        recorder: Recorder = SILENT,
        slice_pages: int | None = None,
    ) -> None:
        """``slice_pages``: different KV pages that one slice may see, None = any number."""
        self.operations = operations
        self.stream = stream
        self.slice_tokens = slice_tokens
        self.recorder = recorder
        self.slice_pages = slice_pages

    def run(self, spans: Sequence[SweepSpan], sample: Sampled) -> None:
        """Compute ``spans`` and hand the logits to ``sample``, in span order.

        Raises SweepAborted after the stream's ``abort``, StorageError when a read failed, MemoryError when the spans
        need more activations than the workspace holds. The stream has to be ``reset`` after any exception.
        """
        tokens = sum(len(span.tokens) for span in spans)
        operations = self.operations
        operations.begin(tokens)
        wanted = sum(span.wants_logits for span in spans)
        self.stream.begin_sweep(tokens, wanted or tokens)
        operations.embed([token for span in spans for token in span.tokens])
        slices = [operations.slice(part) for part in cut_slices(spans, self.slice_tokens, self.slice_pages)]
        # Where no row wants logits all go to the end: modules and stream have something to be in step with.
        steps = [run_slice(operations.skeleton, slice_, narrow=wanted > 0) for slice_ in slices]
        calls = [next(step) for step in steps]
        while (kind := calls[0].kind) != "head":
            rows = sum(call.x.shape[0] for call in calls)
            x = combine(calls, padded(rows))
            since = self.recorder.now()
            result = operations.module(kind, calls[0].layer, x, rows)
            self.recorder.module(kind, calls[0].layer, rows, since)
            steps, calls = _resume(steps, calls, result, self.recorder)
            if kind in HALVES:
                operations.end_half()
        rows, since = sum(call.x.shape[0] for call in calls), self.recorder.now()
        for first, logits in operations.head(rows):
            self.recorder.module("head", -1, rows, since)
            since = self.recorder.now()
            sample(logits, first)
            self.recorder.module("sampler", -1, logits.shape[0], since)
            since = self.recorder.now()


def cut_slices(spans: Sequence[SweepSpan], slice_tokens: int, slice_pages: int | None = None) -> list[Slice]:
    """Consecutive spans up to ``slice_tokens`` tokens that see up to ``slice_pages`` pages (shared ones counted for
    each); a span that exceeds either is a slice of its own."""
    groups: list[list[SweepSpan]] = [[]]
    size = pages = 0
    for span in spans:
        seen = pages_for(span.start + len(span.tokens))
        full = size + len(span.tokens) > slice_tokens or (slice_pages is not None and pages + seen > slice_pages)
        if groups[-1] and full:
            groups.append([])
            size = pages = 0
        groups[-1].append(span)
        size += len(span.tokens)
        pages += seen
    slices: list[Slice] = []
    start = logits = 0
    for group in groups:
        slices.append(_make_slice(group, start, logits))
        start = slices[-1].stop
        logits += len(slices[-1].logit_rows)
    return slices


def _make_slice(spans: Sequence[SweepSpan], start: int, logits_before: int) -> Slice:
    rows: list[SpanRows] = []
    logit_rows: list[int] = []
    at = 0
    for span in spans:
        rows.append(SpanRows(at, span.start, len(span.tokens), span.pages))
        at += len(span.tokens)
        if span.wants_logits:
            logit_rows.append(at - 1)
    return Slice(start, start + at, rows, logit_rows, logits_before)


def _resume(
    steps: Sequence[Steps], calls: Sequence[ModuleCall], result: torch.Tensor, recorder: Recorder
) -> tuple[list[Steps], list[ModuleCall]]:
    """Send every slice its rows of the combined result; returns those that go on, and where each parks next."""
    going: list[Steps] = []
    following: list[ModuleCall] = []
    at = 0
    for step, call in zip(steps, calls, strict=True):
        count, since = call.x.shape[0], recorder.now()
        try:
            following.append(step.send(result[at : at + count]))
            going.append(step)
        except StopIteration:  # none of its rows is wanted any further
            pass
        recorder.slice_step(call.kind, call.layer, count, since)
        at += count
    return going, following
