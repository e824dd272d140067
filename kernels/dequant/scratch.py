"""Memory of decoders: reused scratch tensors, and pieces small enough to stay in the cache.

Decoders make their temporaries without naming a device, on the CPU that is. ``decoding_on`` lets them, unchanged, work
on the memory of another.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from batchgen_lite.kernels.temporaries import kept_bytes

CHUNK_ELEMENTS = 1 << 21
"""Elements whose scales are unpacked together: enough that the many small operations on scales weigh nothing."""

PIECE_ELEMENTS = 1 << 19
"""Elements decoded together: temporaries of some 2 MiB stay in the last cache, and calls into torch (5-10 us each) cost
little beside the work. A quarter of it is slower for every packed format; twice as much gains nothing."""

_MAX_KEPT_BYTES = 4 << 20
"""A larger request (one row longer than a chunk) gets a tensor of its own that is freed afterwards."""


def scratch(slot: str, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """An uninitialised 1-D tensor [numel], the calling thread's own; valid until the slot is next asked for.

    Buffers are reused, because page faults on fresh temporaries would cost as much as the decoding. The buffers of all
    slots together stay below 12 MiB per thread.
    """
    nbytes = numel * dtype.itemsize
    if nbytes > _MAX_KEPT_BYTES or torch.get_default_device().type != "cpu":
        return torch.empty(numel, dtype=dtype)
    return kept_bytes(("decoding", slot), nbytes).view(dtype)


@contextmanager
def decoding_on(device: torch.device) -> Iterator[None]:
    """Within it, in this thread, decoders' temporaries and tables lie on ``device``, as their operands have to.

    Temporaries are then fresh ones: torch's allocator for the device reuses memory cheaply, and kept ones would lie
    outside every budget.
    """
    if device.type == "cpu":
        yield
        return
    with torch.device(device):
        yield


def pieces(blocks: int, block_size: int) -> Iterator[slice]:
    """Ranges of ``blocks`` blocks (or rows) of ``block_size`` elements, each of about ``PIECE_ELEMENTS`` elements."""
    step = max(1, PIECE_ELEMENTS // block_size)
    for start in range(0, blocks, step):
        yield slice(start, min(start + step, blocks))
