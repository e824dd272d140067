"""Which maths a CUDA card computes with: the Triton kernels, or torch where they cannot serve."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import torch

from batchgen_lite.kernels.availability import preferred_dtype, unavailable_reason
from batchgen_lite.models.spec import ModelSpec
from batchgen_lite.offload.devices.cuda import CudaDevice
from batchgen_lite.offload.kv import kv_dtype_of
from batchgen_lite.runtime.device_transfers import COUNT_BYTES, Transfers
from batchgen_lite.runtime.operations import Operations
from batchgen_lite.runtime.placed_model import PlacedModel
from batchgen_lite.runtime.placement import Placement
from batchgen_lite.runtime.planner import ModelSize
from batchgen_lite.runtime.triton_activations import triton_activations


def compute_dtype(spec: ModelSpec, capability: tuple[int, int]) -> torch.dtype:
    """Of activations: the checkpoint's where the card has units for it; bfloat16 before Ampere becomes float16."""
    if spec.dtype == "float32":
        return torch.float32
    return torch.float16 if spec.dtype == "float16" else preferred_dtype(capability)


def kernels_reason(device: torch.device, spec: ModelSpec) -> str | None:
    """Why the Triton kernels cannot run this model on ``device``, as one clause for a message; None if they can."""
    reason = unavailable_reason(device)
    if reason is not None:
        return reason
    if spec.norm_placement == "post" and spec.residual_scale != 1.0:
        return "no kernel scales the residual of a model whose norms come after"
    return None


def size_on_card(device: CudaDevice, size: ModelSize, spec: ModelSpec, kv_dtype: str) -> ModelSize:
    """``size`` with what a sweep takes on ``device``; ``kv_dtype`` as EngineOptions has it. The torch path takes what
    the CPU takes."""
    assert size.activations is not None
    if kernels_reason(device.torch_device, spec) is not None:
        return size
    dtype = compute_dtype(spec, device.capability)
    cache = kv_dtype_of(kv_dtype, spec.dtype)
    return replace(size, activations=triton_activations(size.activations, spec, dtype.itemsize, cache.itemsize))


def cuda_operations(device: CudaDevice, model: PlacedModel, owned: contextlib.ExitStack) -> Operations:
    """Operations of ``model`` on ``device``, its card; ``owned`` closes what they hold. Their ``describe`` says which
    they are, and of the slower ones why."""
    reason = kernels_reason(device.torch_device, model.spec)
    if reason is not None:
        from batchgen_lite.runtime.cuda_torch_operations import CudaTorchOperations

        placement = Placement(device, model.workspace, model.staging_bytes)
        owned.callback(placement.close)
        return CudaTorchOperations(model, placement, reason)
    # Imports triton, 71 MB of it.
    from batchgen_lite.runtime.triton_operations import TritonOperations

    transfers = Transfers(device, model.staging_bytes + COUNT_BYTES)
    owned.callback(transfers.close)
    return TritonOperations(model, transfers, compute_dtype(model.spec, device.capability))
