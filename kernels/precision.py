"""fp32 that is fp32: a process may have allowed its libraries to round the operands of products to fewer bits."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def full_precision() -> Iterator[None]:
    """Within it fp32 products keep all bits of their operands, on the CPU and on cards, whatever
    ``torch.set_float32_matmul_precision`` or ``fp32_precision`` of a backend said before; afterwards it holds again.
    The setting is the whole process's: what other threads multiply meanwhile is more precise than they asked for."""
    # torch puts an object with attributes of its own in this module's place, which mypy does not see.
    settings = (torch.backends.mkldnn.matmul, torch.backends.cuda.matmul)  # type: ignore[attr-defined]
    before = [setting.fp32_precision for setting in settings]
    for setting in settings:
        setting.fp32_precision = "ieee"
    try:
        yield
    finally:
        for setting, precision in zip(settings, before, strict=True):
            setting.fp32_precision = precision
