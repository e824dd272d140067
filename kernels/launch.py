"""What every launcher shares: operand checks with messages that name the operand, and a launch that can be looked at.

A launcher first builds a ``Launch`` (kernel, grid, arguments) and then runs it. Because the arguments are known before
anything runs, the same launchers called on ``meta`` tensors give ahead-of-time compilation its exact signatures
(``aot.py``): what is compiled in the tests is what is launched on the card.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

FLOATS = (torch.float32, torch.float16, torch.bfloat16)


class OperandError(ValueError):
    """A kernel was given an operand of wrong shape, stride, dtype or residency: the caller's bug, not the user's."""


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel call. ``arguments`` holds every parameter by name, constexprs included; grid sizes may be 0."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: Mapping[str, Any]
    num_warps: int
    num_stages: int

    def run(self) -> None:
        """Queue the kernel on the current stream of the operands' device; an empty grid launches nothing."""
        if 0 in self.grid:
            return
        with _current(self._device()):
            self.kernel[self.grid](**self.arguments, **self.options)

    @property
    def options(self) -> dict[str, Any]:
        """Compiler options. Fusion of multiply and add is named because its default changes between triton versions."""
        return {"num_warps": self.num_warps, "num_stages": self.num_stages, "enable_fp_fusion": True}

    def _device(self) -> torch.device:
        return next(value.device for value in self.arguments.values() if isinstance(value, torch.Tensor))


def _current(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Triton launches on the *current* device; of several cards the operands' one must be it."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def require(
    name: str,
    tensor: torch.Tensor,
    shape: Sequence[int | None],
    dtypes: torch.dtype | Sequence[torch.dtype],
    device: torch.device,
    *,
    dense: int = 1,
) -> None:
    """Check one operand. ``None`` in ``shape`` accepts any size; the last ``dense`` dimensions must be contiguous.

    Raises OperandError naming the operand, what it is and what it should be.
    """
    allowed = (dtypes,) if isinstance(dtypes, torch.dtype) else tuple(dtypes)
    if tensor.dim() != len(shape) or any(
        want is not None and want != got for want, got in zip(shape, tensor.shape, strict=True)
    ):
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise OperandError(f"{name}: shape {list(tensor.shape)}, but [{wanted}] is required; pass a matching view")
    if tensor.dtype not in allowed:
        names = " or ".join(str(dtype).removeprefix("torch.") for dtype in allowed)
        raise OperandError(f"{name}: dtype {str(tensor.dtype).removeprefix('torch.')}, but {names} is required")
    if tensor.device != device:
        raise OperandError(f"{name}: lies on {tensor.device}, but the kernel runs on {device}; copy it there first")
    expected = 1
    for axis in range(1, min(dense, tensor.dim()) + 1 if tensor.numel() else 1):
        if tensor.shape[-axis] > 1 and tensor.stride(-axis) != expected:
            raise OperandError(
                f"{name}: strides {list(tensor.stride())}, but the last {dense} dimension(s) must be contiguous; "
                "pass tensor.contiguous()"
            )
        expected *= tensor.shape[-axis]


def require_disjoint(name: str, output: torch.Tensor, inputs: Mapping[str, torch.Tensor | None]) -> None:
    """Refuse an output that shares memory with an input that other programs of the same launch still read."""
    for other, tensor in inputs.items():
        if tensor is None or tensor.device.type == "meta":
            continue
        if output.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr() and _overlap(output, tensor):
            raise OperandError(f"{name} overlaps {other} in memory; give it memory of its own")


def _overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    spans = []
    for tensor in (a, b):
        if tensor.numel() == 0:
            return False
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        start = tensor.storage_offset() * tensor.element_size()
        spans.append((start, start + (last + 1) * tensor.element_size()))
    return spans[0][0] < spans[1][1] and spans[1][0] < spans[0][1]


def upload(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A small host table on ``device`` without waiting for the device: a pageable copy would drain the stream.

    Where pinning is refused (WSL2 limits it), the copy waits.
    """
    if device.type != "cuda":
        return host.to(device)
    try:
        return host.pin_memory().to(device, non_blocking=True)
    except RuntimeError:
        return host.to(device)


def upload_together(hosts: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """As ``upload``, several small tables in one copy: a launch of a streamed tile takes four."""
    if device.type != "cuda":
        return [host.to(device) for host in hosts]
    sizes = [-(-host.nbytes // 16) * 16 for host in hosts]
    joined = torch.zeros(sum(sizes), dtype=torch.uint8)
    for at, host in zip(accumulate(sizes, initial=0), hosts, strict=False):
        joined[at : at + host.nbytes] = host.reshape(-1).view(torch.uint8)
    there = upload(joined, device)
    return [
        there[at : at + host.nbytes].view(host.dtype).view(host.shape)
        for at, host in zip(accumulate(sizes, initial=0), hosts, strict=False)
    ]


def dtype_name(dtype: torch.dtype) -> str:
    """The short name that the configuration table uses: "fp32", "fp16", "bf16", "int8"."""
    return {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.int8: "int8"}[dtype]


def capability_of(device: torch.device) -> str:
    """The compute capability as the configuration table writes it ("8.9"); "any" off CUDA (interpreter, meta)."""
    if device.type != "cuda":
        return "any"
    major, minor = torch.cuda.get_device_capability(device)
    return f"{major}.{minor}"


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def power_of_two(n: int) -> int:
    """The smallest power of two >= max(n, 1)."""
    return 1 << max(n - 1, 0).bit_length()
