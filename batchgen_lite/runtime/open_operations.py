"""Which maths a device computes with."""

from __future__ import annotations

import contextlib

from batchgen_lite.offload.devices.cuda import CudaDevice
from batchgen_lite.runtime.cpu_operations import CpuOperations
from batchgen_lite.runtime.cuda_operations import cuda_operations
from batchgen_lite.runtime.expert_workers import ExpertWorkers
from batchgen_lite.runtime.operations import Operations
from batchgen_lite.runtime.placed_model import PlacedModel
from batchgen_lite.runtime.placement import Placement
from batchgen_lite.runtime.sim_operations import SimOperations


def make_operations(model: PlacedModel, owned: contextlib.ExitStack) -> Operations:
    """Operations for the model's device. ``owned`` closes what they hold."""
    if isinstance(model.device, CudaDevice):
        return cuda_operations(model.device, model, owned)
    placement = Placement(model.device, model.workspace, model.staging_bytes)
    owned.callback(placement.close)
    if model.device.name == "sim":
        return SimOperations(model, placement)
    if model.workers == 1:
        return CpuOperations(model, placement)
    workers = ExpertWorkers(model.workers)
    owned.callback(workers.close)
    return CpuOperations(model, placement, workers=workers)
