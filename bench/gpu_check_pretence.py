"""A card for dry runs: the CUDA device over streams that do everything at once, in the host's memory."""

from __future__ import annotations

import torch

from batchgen_lite.offload.devices.cuda import CudaDevice
from batchgen_lite.offload.devices.host import Happened
from batchgen_lite.offload.devices.protocol import Event

FREE = 2 << 30


class InstantStreams:
    """Implements StreamLayer without any delay."""

    torch_device = torch.device("cpu")

    def compute_stream(self) -> str:
        return "compute"

    def new_stream(self, purpose: str) -> str:
        return purpose

    def copy(self, stream: object, source: torch.Tensor, target: torch.Tensor) -> None:
        target.copy_(source)

    def record(self, stream: object) -> Event:
        return Happened()

    def wait(self, stream: object, event: Event) -> None: ...

    def synchronize(self, stream: object) -> None: ...

    def allocate(self, nbytes: int) -> torch.Tensor:
        raw = torch.full((nbytes + 256,), 0xFF, dtype=torch.uint8)
        skip = -raw.data_ptr() % 256
        return raw[skip : skip + nbytes]

    def limit(self, nbytes: int) -> None: ...

    def free_and_total(self) -> tuple[int, int]:
        return FREE, FREE

    def peak(self) -> int:
        return 0

    def pin(self, address: int, nbytes: int) -> str | None:
        return "nothing is pinned in a dry run"

    def unpin(self, address: int) -> None: ...


def pretended_card() -> CudaDevice:
    return CudaDevice(InstantStreams(), vram=1 << 30, name="cuda:0", card="pretended")
