"""The real stream layer: torch.cuda's streams, events and caching allocator, and cudart's pinning.

Importing this module does not touch CUDA; making a ``TorchStreams`` does.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import torch

from batchgen_lite.offload.devices.protocol import Event
from batchgen_lite.offload.devices.streams import DeviceFull, Stream


class TorchStreams:
    """StreamLayer of one CUDA card.

    Compute goes to torch's default stream, on which torch and Triton queue of themselves, from whichever thread. The
    copy streams are torch's side streams, which are made non-blocking, so the default stream's implicit ordering
    does not reach them.
    """

    def __init__(self, index: int) -> None:
        self.torch_device = torch.device("cuda", index)
        torch.cuda.init()
        torch.cuda.reset_peak_memory_stats(self.torch_device)

    def compute_stream(self) -> Stream:
        return torch.cuda.default_stream(self.torch_device)

    def new_stream(self, purpose: str) -> Stream:
        return torch.cuda.Stream(self.torch_device)

    def copy(self, stream: Stream, source: torch.Tensor, target: torch.Tensor) -> None:
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)

    def record(self, stream: Stream) -> Event:
        # Blocking: a host that waits sleeps instead of spinning, and leaves its core to the reader threads.
        event = torch.cuda.Event(blocking=True)
        event.record(stream)
        return _TorchEvent(event)

    def wait(self, stream: Stream, event: Event) -> None:
        assert isinstance(event, _TorchEvent)
        stream.wait_event(event.event)

    def synchronize(self, stream: Stream) -> None:
        stream.synchronize()

    def allocate(self, nbytes: int) -> torch.Tensor:
        try:
            return torch.empty(nbytes, dtype=torch.uint8, device=self.torch_device)
        except torch.OutOfMemoryError as error:
            free, total = self.free_and_total()
            raise DeviceFull(f"{free} of {total} bytes of the card are free") from error

    def limit(self, nbytes: int) -> None:
        _, total = self.free_and_total()
        torch.cuda.set_per_process_memory_fraction(min(1.0, nbytes / total), self.torch_device)

    def free_and_total(self) -> tuple[int, int]:
        return torch.cuda.mem_get_info(self.torch_device)

    def peak(self) -> int:
        return torch.cuda.max_memory_reserved(self.torch_device)

    def pin(self, address: int, nbytes: int) -> str | None:
        with torch.cuda.device(self.torch_device):
            code = int(torch.cuda.cudart().cudaHostRegister(address, nbytes, 0))
        if code == 0:
            return None
        clear_last_error()
        return f"{torch.cuda.CudaError(code)}"

    def unpin(self, address: int) -> None:
        with torch.cuda.device(self.torch_device):
            code = int(torch.cuda.cudart().cudaHostUnregister(address))
        if code != 0:
            clear_last_error()


class _TorchEvent:
    __slots__ = ("event",)

    def __init__(self, event: torch.cuda.Event) -> None:
        self.event = event

    def done(self) -> bool:
        return bool(self.event.query())

    def synchronize(self) -> None:
        self.event.synchronize()


def clear_last_error(maps: Path = Path("/proc/self/maps")) -> list[str]:
    """Take back the error that a refused cudart call leaves behind for the next checked one, in this thread; the
    libraries that were asked.

    torch's binding of cudaHostRegister returns the code but does not clear it, and offers no cudaGetLastError: without
    this, an unrelated kernel launch would report the refusal as its own. Several copies of libcudart may be loaded.
    """
    found = _loaded_cudart(maps)
    for path in found:
        try:
            ctypes.CDLL(path, mode=os.RTLD_NOLOAD | os.RTLD_NOW).cudaGetLastError()
        except (OSError, AttributeError):
            continue  # not loaded under this name after all: then it holds no error either
    return found


def _loaded_cudart(maps: Path) -> list[str]:
    """Paths of loaded CUDA runtime libraries; wheels of torch may name theirs libcudart-<hash>.so.12."""
    try:
        lines = maps.read_text().splitlines()
    except OSError:
        return []
    paths = (line.split(maxsplit=5)[5].removesuffix(" (deleted)") for line in lines if "libcudart" in line)
    return sorted(set(paths))
