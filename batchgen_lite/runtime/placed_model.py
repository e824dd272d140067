"""A model as a device's maths finds it."""

from __future__ import annotations

from dataclasses import dataclass, field

from batchgen_lite.models.layers import Skeleton
from batchgen_lite.models.spec import ModelSpec
from batchgen_lite.offload.devices.protocol import Device
from batchgen_lite.offload.embedding import EmbeddingTable
from batchgen_lite.offload.kv import KVPool
from batchgen_lite.offload.stream import WeightStream
from batchgen_lite.offload.workspace import Workspace
from batchgen_lite.runtime.widened_tiles import WidenedTiles


@dataclass(frozen=True, slots=True)
class PlacedModel:
    """What Operations compute with. ``skeleton``, ``kv`` and ``workspace`` lie on ``device``; ``staging_bytes``: host
    memory for what travels there and back beside weights and KV, 0 where the device is not separate; ``widened``: where
    the CPU keeps weights in fp32; ``workers``: experts that it computes side by side."""

    device: Device
    spec: ModelSpec
    skeleton: Skeleton
    stream: WeightStream
    embedding: EmbeddingTable
    kv: KVPool
    workspace: Workspace
    staging_bytes: int
    widened: WidenedTiles = field(default_factory=WidenedTiles)
    workers: int = 1
