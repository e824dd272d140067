"""The maths of a sweep behind two protocols, so that a device brings its own and the sweep stays the same.

`Operations` belongs to one device and one model; a sweep goes through it like this, all on the engine thread:

    begin(tokens)                              memory of the sweep before is free; [T, H] hidden rows are there
    embed(ids)                                 fill them
    slice(part) for every slice                index tables of the slice's spans; a SliceOperations
    per layer, per module kind:
        slices' own steps                      SliceOperations, called by runtime/slices.py, which is the model;
                                               ``narrow`` leaves the last layer fewer rows
        module(kind, layer, x, tokens)         weights pass by: linear, per-head, dense FFN, routed experts
        end_half(), twice a layer              results have been added to the hidden rows; their memory is free again
    head(rows)                                 logits, on the host

Shapes: T is the sweep's tokens padded to a multiple of 16, a slice's tensors are its n rows of [T, width] tensors. A
slice's rows lie between its neighbours' in one tensor, so combining slices copies nothing. ``dtype`` is that of hidden
rows and of everything handed between modules and slices: fp32 on the CPU, what the card computes best elsewhere;
logits are fp32 always.

What an implementation has to keep (docs/architecture.md, "Exactness"): a token's bits do not depend on the tokens
beside it, on T, on slices, nor on which tiles are resident. Whatever is returned stays valid until ``end_half``, or
until ``begin`` for what says so; memory comes from the workspace and from nowhere else, except scratch that one call
allocates and frees.

Operations do not wait for the device; weights come from the stream with the order of copies and kernels seen to
(offload/stream.py). ``head`` is the one place where the host waits for results.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch

from batchgen_lite.models.layers import Layer, Skeleton
from batchgen_lite.runtime.slice_state import Slice


class SliceOperations(Protocol):
    """What one slice does between modules, on its own rows. Vectors come from ``Operations.skeleton``'s layers."""

    def normed(self, weight: torch.Tensor) -> torch.Tensor:
        """RMSNorm of the slice's hidden rows [n, H], into the sweep's normed rows; a plain copy where the model's norm
        comes after (``norm_placement`` "post")."""
        ...

    def add(self, delta: torch.Tensor, norm: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        """hidden += residual_scale * (delta + bias), where the norm comes after: of RMSNorm(delta + bias, ``norm``).

        ``delta`` [n, H] any strides: the module's result. ``normed`` follows at once, unless the layers are done, in
        which case ``final`` does; so an implementation may keep ``delta`` and fuse the two."""
        ...

    def attention(self, layer: Layer, qkv: torch.Tensor) -> torch.Tensor:
        """Bias, q/k norm, rope and the write into the KV pages, then paged attention over the slice's own sequences.

        ``qkv`` [n, Hq * D + Hkv * D + Hkv * Dv], any strides; returns [n, Hq * Dv]."""
        ...

    # -- multi-head latent attention (runtime/latent_attention.py says what the steps are) --

    def query_latent(self, layer: Layer, latent: torch.Tensor) -> torch.Tensor:
        """Bias and norm of the query's latent: "q_a"'s result [n, q_lora_rank] to "q_b"'s input."""
        ...

    def latent_heads(self, layer: Layer, query: torch.Tensor, latent: torch.Tensor) -> torch.Tensor:
        """``query`` [n, Hq * (nope + rope)] and "kv_a"'s result [n, rank + rope]: biases, norm, rope, the write of
        compressed latent and rotary key into the KV pages. Keeps the rotated part of the queries for
        ``latent_attention``; returns the plain part [n, Hq * nope], "absorb_k"'s input."""
        ...

    def latent_attention(self, layer: Layer, absorbed: torch.Tensor) -> torch.Tensor:
        """Paged attention of ``absorbed`` [n, Hq * rank] and the kept rotary part: [n, Hq * rank], for "absorb_v"."""
        ...

    def latent_values(self, layer: Layer, values: torch.Tensor) -> torch.Tensor:
        """ "absorb_v"'s result [n, Hq * Dv], any strides, as "out"'s input."""
        ...

    # -- behind the last attention --

    def narrow(self, attended: torch.Tensor) -> torch.Tensor:
        """Go on with the rows that want logits alone: of ``attended`` [n, Hq * Dv], the last layer's input of "out",
        those [m, Hq * Dv]. All slices that are called for it are, in their order, before the module runs: what is left
        of them lies together at the front of their tensors."""
        ...

    def final(self) -> torch.Tensor:
        """The final norm of the rows that want logits [m, H], kept for ``Operations.head``. All slices that have any
        call it, in their order."""
        ...


class Operations(Protocol):
    """One device's maths for sweeps of one model. ``skeleton``: the model's vectors, on the device."""

    dtype: torch.dtype
    skeleton: Skeleton

    def begin(self, tokens: int) -> None:
        """A sweep of ``tokens`` tokens begins; whatever an earlier one, finished or not, has left is void. Raises
        MemoryError, as everything below does, when the workspace does not hold the sweep."""
        ...

    def embed(self, ids: Sequence[int]) -> None:
        """Token embeddings, scaled, into the hidden rows; padding rows are zeroed. StorageError when a read fails."""
        ...

    def slice(self, part: Slice) -> SliceOperations:
        """Make ready for one slice: index tables on the device, valid for the sweep. Slices come in row order."""
        ...

    def module(self, kind: str, layer: int, x: torch.Tensor, tokens: int) -> torch.Tensor:
        """One module (kinds as in models/modules.py, all but "head" and "router") on all slices' rows.

        ``x`` [T, width], contiguous, T padded, of which the first ``tokens`` rows count: all of the sweep's, or those
        that ``narrow`` has left. "experts" routes all tokens at once and runs each chosen expert on its tokens, shared
        ones on all. Returns [T, result width], possibly strided. Raises what WeightStream.tiles raises."""
        ...

    def end_half(self) -> None:
        """All slices have added the result of a module that ends a half of a layer: what modules and slices have taken
        since the slices were made is free, the hidden rows excepted."""
        ...

    def head(self, rows: int) -> Iterator[tuple[int, torch.Tensor]]:
        """Logits of the ``rows`` rows that slices gave to ``final``: blocks of (first row, fp32 [b, vocab]) in row
        order, on the host, each valid until the next; bias and scale applied. The head's tiles are taken from the
        stream even for no rows, to keep it in step."""
        ...

    def describe(self) -> str:
        """One line for people: which maths this is, and where it is not the best for the device, why."""
        ...
