"""``doctor``: how fast matrix products run per dtype, the GPU, and the way to it. Imports torch when called."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from batchgen_lite.cli.doctor_finding import Finding
from batchgen_lite.cli.doctor_machine import is_wsl
from batchgen_lite.offload.budget import MIB, format_size

if TYPE_CHECKING:
    import torch

MEASURED_SECONDS = 0.15
COPY_BYTES = 256 * MIB
# Rows, columns and tokens of a product: an expert's batch on a processor; what fills a GPU there.
_SHAPES = {"cpu": (1024, 1024, 64), "cuda": (4096, 4096, 1024)}


def gemm_rates() -> Iterator[Finding]:
    """On the processor, and on the GPU where there is one, per dtype."""
    import torch

    yield _gemm_finding("processor", torch.device("cpu"))
    if torch.cuda.is_available():
        yield _gemm_finding("GPU", torch.device("cuda"))


def gpu() -> Iterator[Finding]:
    import torch

    if not torch.cuda.is_available():
        yield Finding("GPU", "device", "none that torch can use", _no_gpu_advice(torch.version.cuda))
        return
    driver = _first_line(Path("/proc/driver/nvidia/version"))
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        capability = (properties.major, properties.minor)
        yield Finding(
            "GPU",
            f"device {index}",
            f"{properties.name}, compute capability {capability[0]}.{capability[1]}, {format_size(free)} of "
            f"{format_size(total)} free, CUDA {torch.version.cuda}{f', {driver}' if driver else ''}",
            card_advice(index, properties.name, capability),
            data={"name": properties.name, "capability": list(capability), "free": free, "total": total},
        )


def card_advice(index: int, name: str, capability: tuple[int, int]) -> str:
    """Why ``--device cuda:N`` cannot be had on this card, or computes in torch instead of our kernels; else ""."""
    import torch

    from batchgen_lite.kernels.availability import capability_reason, unavailable_reason
    from batchgen_lite.offload.devices.open_cuda import Cards, refusal

    targets = tuple(torch.cuda.get_arch_list())
    refused = refusal(0, Cards(torch.version.cuda or "", True, ((name, capability),), targets))
    if refused is not None:
        return f"--device cuda:{index} is refused: {refused}"
    reason = capability_reason(capability, name) or unavailable_reason(torch.device("cuda", index))
    return f"products run in torch, in float32, as the kernels cannot be used: {reason}" if reason else ""


def copies_to_gpu() -> Iterator[Finding]:
    """Pinned memory and what it brings; nothing without CUDA."""
    import torch

    if not torch.cuda.is_available():
        yield Finding("GPU", "pinned memory", "not needed without a GPU")
        return
    pageable = torch.ones(COPY_BYTES, dtype=torch.uint8)
    target = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda")
    try:
        pinned = torch.ones(COPY_BYTES, dtype=torch.uint8, pin_memory=True)
    except RuntimeError as error:
        remedy = "raise memory= in .wslconfig, pinned memory is half of it" if is_wsl() else "raise ulimit -l"
        yield Finding("GPU", "pinned memory", f"refused: {error}", f"{remedy}; copies to the GPU run at half speed")
        return
    rates = {
        name: COPY_BYTES / _seconds_per_call(functools.partial(target.copy_, source), torch.cuda.synchronize)
        for name, source in (("pinned", pinned), ("pageable", pageable))
    }
    yield Finding(
        "GPU",
        "host to device",
        ", ".join(f"{format_size(round(rate))}/s {name}" for name, rate in rates.items()),
        "under 3 GiB/s: is the card in a x4 slot or behind a dock? see nvidia-smi -q -d PERFORMANCE"
        if rates["pinned"] < 3e9
        else "",
        data={"bytes_per_second": rates},
    )
    if is_wsl():
        yield Finding("GPU", "pinned memory", "WSL2 allows about half of its memory (memory= in .wslconfig)")


def _gemm_finding(section: str, device: torch.device) -> Finding:
    import torch

    from batchgen_lite.kernels.products import product

    synchronize = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    rows, cols, tokens = _SHAPES[device.type]
    rates: dict[str, float] = {}
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        left = torch.ones(rows, cols, dtype=dtype, device=device)
        right = torch.ones(cols, tokens, dtype=dtype, device=device)
        out = torch.empty(rows, tokens, dtype=dtype, device=device)
        call: Callable[[], object] = functools.partial(torch.mm, left, right, out=out)
        if device.type == "cpu" and dtype == torch.float32:
            call = functools.partial(product, left, right.t())  # what sweeps run there
        seconds = _seconds_per_call(call, synchronize)
        rates[str(dtype).removeprefix("torch.")] = 2 * rows * cols * tokens / seconds
    threads = f" ({torch.get_num_threads()} threads)" if device.type == "cpu" else ""
    text = ", ".join(f"{name} {rate / 1e9:,.{0 if rate >= 1e10 else 1}f}" for name, rate in rates.items())
    return Finding(section, "matrix products", f"{text} GFLOP/s{threads}", data={"flops": rates})


def _seconds_per_call(call: Callable[[], object], synchronize: Callable[[], object]) -> float:
    """Mean over ``MEASURED_SECONDS``, at least one call, after one that warms up."""
    call()
    synchronize()
    calls, began = 0, time.perf_counter()
    while calls == 0 or time.perf_counter() - began < MEASURED_SECONDS:
        call()
        calls += 1
        if calls % 8 == 0:
            synchronize()
    synchronize()
    return (time.perf_counter() - began) / calls


def _no_gpu_advice(cuda_build: str | None, dev: Path = Path("/dev")) -> str:
    card = (dev / "nvidiactl").exists() or (dev / "dxg").exists()
    if not card:
        return ""  # a machine without a GPU is no problem, it is only slower
    if cuda_build is None:
        return "an NVIDIA device is there, but this torch is built without CUDA: reinstall torch from its default index"
    return f"an NVIDIA device is there, but the driver does not serve CUDA {cuda_build}: update it, check nvidia-smi"


def _first_line(path: Path) -> str:
    try:
        return path.read_text().splitlines()[0]
    except (OSError, IndexError):
        return ""
