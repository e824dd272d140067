"""Reused scratch tensors for decoders: page faults on fresh temporaries would cost as much as the decoding."""

from __future__ import annotations

import threading

import torch

_MAX_KEPT_BYTES = 4 << 20
"""A larger request (one row longer than a chunk) gets a tensor of its own that is freed afterwards."""

_local = threading.local()


def scratch(slot: str, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """An uninitialised 1-D tensor [numel], the calling thread's own; valid until the slot is next asked for.

    The buffers of all slots together stay below a few MiB per thread.
    """
    nbytes = numel * dtype.itemsize
    if nbytes > _MAX_KEPT_BYTES:
        return torch.empty(numel, dtype=dtype)
    kept: dict[str, torch.Tensor] = _local.__dict__.setdefault("kept", {})
    buffer = kept.get(slot)
    if buffer is None or buffer.numel() < nbytes:
        buffer = kept[slot] = torch.empty(-(-nbytes // 64) * 64, dtype=torch.uint8)
    return buffer[:nbytes].view(dtype)
