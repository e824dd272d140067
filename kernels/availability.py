"""Whether the Triton kernels can serve a device, and if not, why: the caller says so and takes the torch path."""

from __future__ import annotations

import importlib.util
import os

import torch

MIN_CAPABILITY = (8, 0)


def interpreted() -> bool:
    """True where kernels run in Triton's interpreter (TRITON_INTERPRET=1): slow, on CPU tensors, for tests only."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes")


def unavailable_reason(device: torch.device) -> str | None:
    """Why the kernels cannot run on ``device``, as one clause for a message; None if they can.

    fp8 weights need nothing special: they are decoded by integer arithmetic, on every card from capability 8.0 on.
    """
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed (pip install triton; Linux only)"
    if device.type == "cpu":
        return None if interpreted() else "the device is the CPU, where Triton kernels run only under the interpreter"
    if device.type != "cuda":
        return f"Triton kernels do not serve the device {device.type}"
    if getattr(torch.version, "cuda", None) is None:
        return "this build of torch has no CUDA support; install a CUDA build of torch"
    if not torch.cuda.is_available():
        return "torch finds no usable CUDA device (no card, no driver, or a driver older than this build needs)"
    index = torch.cuda.current_device() if device.index is None else device.index
    if index >= torch.cuda.device_count():
        return f"there is no CUDA device {index}; this machine has {torch.cuda.device_count()}"
    return capability_reason(torch.cuda.get_device_capability(index), torch.cuda.get_device_name(index))


def capability_reason(capability: tuple[int, int], name: str) -> str | None:
    """Why a card of this compute capability is too old; None if it is not."""
    if capability >= MIN_CAPABILITY:
        return None
    wanted = ".".join(map(str, MIN_CAPABILITY))
    return f"{name} has compute capability {capability[0]}.{capability[1]}, but the kernels need {wanted} or newer"


def preferred_dtype(capability: tuple[int, int]) -> torch.dtype:
    """The compute dtype for 16-bit checkpoints: bf16 from Ampere on, fp16 before."""
    return torch.bfloat16 if capability >= (8, 0) else torch.float16
