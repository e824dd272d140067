"""Which maths a device computes with."""

from __future__ import annotations

import contextlib

from batchgen_lite.models.layers import Skeleton
from batchgen_lite.models.spec import ModelSpec
from batchgen_lite.offload.devices.cuda import CudaDevice
from batchgen_lite.offload.devices.protocol import Device
from batchgen_lite.offload.embedding import EmbeddingTable
from batchgen_lite.offload.kv import KVPool
from batchgen_lite.offload.stream import WeightStream
from batchgen_lite.offload.workspace import Workspace
from batchgen_lite.runtime.cpu_operations import CpuOperations
from batchgen_lite.runtime.cuda_operations import cuda_operations
from batchgen_lite.runtime.operations import Operations
from batchgen_lite.runtime.placement import Placement
from batchgen_lite.runtime.sim_operations import SimOperations


def make_operations(
    device: Device,
    spec: ModelSpec,
    skeleton: Skeleton,
    stream: WeightStream,
    embedding: EmbeddingTable,
    kv: KVPool,
    workspace: Workspace,
    staging_bytes: int,
    owned: contextlib.ExitStack,
) -> Operations:
    """Operations for ``device``, on which ``skeleton``, ``kv`` and ``workspace`` lie. ``owned`` closes what they
    hold."""
    if isinstance(device, CudaDevice):
        return cuda_operations(device, spec, skeleton, stream, embedding, kv, workspace, staging_bytes, owned)
    kind = SimOperations if device.name == "sim" else CpuOperations
    placement = Placement(device, workspace, staging_bytes)
    owned.callback(placement.close)
    return kind(spec, skeleton, stream, embedding, kv, workspace, placement)
