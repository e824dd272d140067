"""A CUDA card, or the reason why there is none."""

from __future__ import annotations

import torch

from batchgen_lite.errors import UsageError
from batchgen_lite.offload.devices.cuda import CudaDevice
from batchgen_lite.offload.devices.cuda_streams import TorchStreams


def open_cuda(index: int, vram: int | None) -> CudaDevice:
    """Card number ``index``. Raises UsageError, with the reason, where it cannot be used, BudgetError for ``vram``."""
    if not torch.backends.cuda.is_built():
        raise UsageError("--device cuda: this torch was built without CUDA; install a CUDA build, or use --device cpu")
    count = torch.cuda.device_count()
    if index >= count:
        there = f"there are {count}, numbered from 0" if count else "no card is visible (driver, CUDA_VISIBLE_DEVICES)"
        raise UsageError(f"--device cuda:{index}: {there}; choose another, or use --device cpu")
    return CudaDevice(TorchStreams(index), vram=vram, name=f"cuda:{index}")
