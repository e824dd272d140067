"""KV in host memory for a device of its own: the pages of one layer and one slice at a time, in two windows.

    host pool     every page of every layer; what the scheduler counts
    windows       two pieces of device memory, each for the pages of one layer that one slice can see

Attention goes layer by layer and within a layer slice by slice, so what comes next is known: while one slice computes
in one window, the pages of the next are copied into the other. Pages that a slice writes are copied back behind it.
Latent attention takes two steps, all slices between them: the first needs the pages written only, the second all.

Order is kept by events alone: a window is filled behind whoever used it last, and behind every copy back that has been
queued; the host pool is at rest when ``settle`` returns, between sweeps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from batchgen_lite.kernels.attention.reference import SpanRows
from batchgen_lite.offload.devices.protocol import Device, Event, Lane
from batchgen_lite.offload.kv import KVPool, pool_bytes
from batchgen_lite.offload.pages import PAGE_TOKENS, pages_for


class KVWindow(KVPool):
    """What the maths of a device sees instead of a pool: of each layer the window that was entered last, its pages
    numbered from 0."""

    def __init__(self, pool: KVPool, memory: torch.Tensor) -> None:
        self.pages = 0
        self.dtype = pool.dtype
        self.arena = None
        layers = len(pool.keys)
        nothing = memory[:0]
        self.keys = [nothing] * layers
        self.values = [nothing] * layers
        self.key_scales = [nothing] * len(pool.key_scales)
        self.value_scales = [nothing] * len(pool.value_scales)
        self._memory = memory

    def show(self, layer: int, window: KVPool) -> None:
        """``layer``'s pages are those of ``window``, a pool of one layer."""
        self.keys[layer], self.values[layer] = window.keys[0], window.values[0]
        if self.key_scales:
            self.key_scales[layer], self.value_scales[layer] = window.key_scales[0], window.value_scales[0]

    def tensors(self) -> list[torch.Tensor]:
        return [self._memory]


@dataclass(slots=True)
class _Slice:
    """The pages of one slice: ``pages`` ascending, their place in a window is their rank; ``written``: those that this
    sweep writes to."""

    pages: list[int]
    written: list[int]
    rank: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Request:
    """A slice at a layer; ``first``: the first of a latent layer's two steps."""

    layer: int
    number: int
    first: bool


@dataclass(slots=True)
class _Loaded:
    request: _Request
    buffer: int
    event: Event


class StreamedKV:
    """``pool`` in host memory, used by ``device`` through two windows of ``window_pages`` pages each. ``latent``: of
    every layer, whether its attention is latent. ``watch`` is told of every window that compute is about to use."""

    def __init__(
        self,
        pool: KVPool,
        latent: Sequence[bool],
        device: Device,
        window_pages: int,
        watch: Callable[[str, torch.Tensor], object] | None = None,
    ) -> None:
        """Raises BudgetError where the device has no room for the windows."""
        self.pool = pool
        self.window_pages = window_pages
        self._latent, self._device, self._watch = latent, device, watch
        half = window_bytes(pool, window_pages)
        self._memory = device.allocate(2 * half)
        self._buffers = (self._memory.tensor[:half], self._memory.tensor[half:])
        self.window = KVWindow(pool, self._memory.tensor)
        self._views: dict[tuple[int, int], KVPool] = {}
        self._slices: list[_Slice] = []
        self._used: list[Event | None] = [None, None]  # behind the last use of each window
        self._back: Event | None = None  # behind every copy back so far
        self._ahead: _Loaded | None = None
        self._current: _Loaded | None = None

    # -- a sweep --------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """A sweep begins; whatever an earlier one, finished or not, has left is void."""
        self._slices.clear()
        self._ahead = self._current = None
        self._used = [self._device.record(Lane.COMPUTE)] * 2

    def slice(self, spans: Sequence[SpanRows]) -> list[SpanRows]:
        """The next slice of the sweep: its spans with pages as numbered in a window. ValueError if they are more than
        one holds."""
        pages: set[int] = set()
        written: set[int] = set()
        for span in spans:
            seen = span.pages[: pages_for(span.start + span.count)]
            pages.update(seen)
            written.update(seen[span.start // PAGE_TOKENS :])
        if len(pages) > self.window_pages:
            raise ValueError(f"a slice of {len(pages)} pages, but a window holds {self.window_pages}")
        made = _Slice(sorted(pages), sorted(written))
        made.rank = {page: rank for rank, page in enumerate(made.pages)}
        self._slices.append(made)
        if len(self._slices) == 1:
            self._ahead = self._load(_Request(0, 0, self._latent[0]), 0)
        return [
            SpanRows(
                span.row,
                span.start,
                span.count,
                [made.rank[page] for page in span.pages[: pages_for(span.start + span.count)]],
            )
            for span in spans
        ]

    def enter(self, layer: int, number: int, *, first: bool = False) -> None:
        """Slice ``number`` computes with ``layer``'s pages from now on; ``first``: it only writes to them."""
        request = _Request(layer, number, first)
        loaded, self._ahead = self._ahead, None
        if loaded is None or loaded.request != request:
            loaded = self._load(request, 0 if loaded is None else loaded.buffer)
        self._device.wait(Lane.COMPUTE, loaded.event)
        view = self._view(layer, loaded.buffer)
        if self._watch is not None:
            for tensor in view.tensors():
                self._watch(f"KV window of layer {layer}", tensor)
        self.window.show(layer, view)
        self._current = loaded
        following = self._following(request)
        # A slice that comes straight after itself has not written yet what it will read.
        if following is not None and (following.layer, following.number) != (layer, number):
            self._ahead = self._load(following, 1 - loaded.buffer)

    def leave(self) -> None:
        """The work that ``enter`` began has been queued: what it wrote goes back behind it."""
        loaded, self._current = self._current, None
        assert loaded is not None
        request, device = loaded.request, self._device
        used = device.record(Lane.COMPUTE)
        if request.first or not self._latent[request.layer]:
            part = self._slices[request.number]
            pairs = self._pairs(request.layer, loaded.buffer, part, part.written)
            device.wait(Lane.COPY_OUT, used)
            self._back = used = device.copy(Lane.COPY_OUT, [(own, host) for host, own in pairs])
        self._used[loaded.buffer] = used

    def settle(self) -> None:
        """Wait until the host pool is at rest."""
        if self._back is not None:
            self._back.synchronize()
            self._back = None
        self._device.record(Lane.COPY_IN).synchronize()

    def close(self) -> None:
        """Give the windows back. The pool stays its owner's."""
        self.settle()
        self._views.clear()
        self.window.close()
        self._memory.close()

    # -- windows --------------------------------------------------------------------------------------------------

    def _following(self, request: _Request) -> _Request | None:
        """What comes after ``request`` in the order of a sweep."""
        layer, number, first = request.layer, request.number + 1, request.first
        if number == len(self._slices):
            number = 0
            if first:
                first = False
            else:
                layer += 1
                if layer == len(self._latent):
                    return None
                first = self._latent[layer]
        return _Request(layer, number, first)

    def _load(self, request: _Request, buffer: int) -> _Loaded:
        """Queue the copies into a window, behind its last use and behind everything that goes back to the pool."""
        part, device = self._slices[request.number], self._device
        for event in (self._used[buffer], self._back):
            if event is not None:
                device.wait(Lane.COPY_IN, event)
        pages = part.written if request.first else part.pages
        return _Loaded(request, buffer, device.copy(Lane.COPY_IN, self._pairs(request.layer, buffer, part, pages)))

    def _view(self, layer: int, buffer: int) -> KVPool:
        if (layer, buffer) not in self._views:
            shape = self.pool.shapes[layer]
            self._views[layer, buffer] = KVPool([shape], self.window_pages, self.pool.dtype, self._buffers[buffer])
        return self._views[layer, buffer]

    def _pairs(
        self, layer: int, buffer: int, part: _Slice, pages: Sequence[int]
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(in the pool, in the window) of ``pages``; neighbours in both are one pair."""
        runs: list[list[int]] = []
        for page in pages:
            if runs and page == runs[-1][0] + runs[-1][1] and part.rank[page] == part.rank[page - 1] + 1:
                runs[-1][1] += 1
            else:
                runs.append([page, 1])
        pairs = []
        for host, own in zip(self.pool.layer_tensors(layer), self._view(layer, buffer).layer_tensors(0), strict=True):
            for page, count in runs:
                rank = part.rank[page]
                pairs.append((host[page : page + count], own[rank : rank + count]))
        return pairs


def window_bytes(pool: KVPool, pages: int) -> int:
    """Bytes of device memory of one window, aligned."""
    return max(-(-pool_bytes([shape], pages, pool.dtype) // 256) * 256 for shape in pool.shapes)
