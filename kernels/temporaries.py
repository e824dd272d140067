"""Temporaries of kernels on the CPU, kept from call to call.

Large fresh ones come from mappings of their own that the allocator gives back at once (offload/malloc_tuning.py), so
every element would cost its share of a page fault: measured, that was three quarters of attention's time.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Sequence
from math import prod

import torch

_local = threading.local()


def temporary(slot: str, shape: Sequence[int], like: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """An uninitialised tensor of ``shape`` on the device of ``like``, of its dtype if ``dtype`` is None.

    On the CPU it is the calling thread's own buffer of this name, valid until the name is next asked for; it grows to
    the largest shape asked for and stays. Elsewhere it is a fresh one: torch reuses a card's memory cheaply by itself.
    """
    dtype = dtype or like.dtype
    if like.device.type != "cpu":
        return torch.empty(tuple(shape), dtype=dtype, device=like.device)
    return kept_bytes(slot, prod(shape) * dtype.itemsize).view(dtype).view(tuple(shape))


def kept_bytes(slot: Hashable, nbytes: int) -> torch.Tensor:
    """The first ``nbytes`` of the calling thread's buffer of this name on the CPU, uint8 [nbytes], uninitialised."""
    kept: dict[Hashable, torch.Tensor] = _local.__dict__.setdefault("kept", {})
    buffer = kept.get(slot)
    if buffer is None or buffer.numel() < nbytes:
        kept.pop(slot, None)  # the old one goes before the new one comes
        with torch.inference_mode(False):  # usable in and out of inference mode, whichever comes first
            buffer = kept[slot] = torch.empty(-(-nbytes // 64) * 64, dtype=torch.uint8, device="cpu")
    return buffer[:nbytes]


def kept_sizes() -> dict[Hashable, int]:
    """Bytes that the calling thread keeps, by name."""
    kept: dict[Hashable, torch.Tensor] = _local.__dict__.get("kept", {})
    return {slot: buffer.numel() for slot, buffer in kept.items()}
