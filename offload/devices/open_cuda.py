"""Opening a CUDA card by number, or saying why it cannot be used.

What a card cannot do is found out here, before anything is loaded: no CUDA in this torch, no such card, a card for
which this torch has no kernels. A card that is too old for the Triton kernels is opened all the same; its products are
then torch's (runtime/open_operations.py), which the description says.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch

from batchgen_lite.errors import UsageError
from batchgen_lite.offload.devices.cuda import CudaDevice

OLDEST = (7, 0)
"""Volta: the oldest that torch's builds for CUDA 12 still serve, and the first with units for 16-bit products."""


@dataclass(frozen=True, slots=True)
class Cards:
    """What torch sees. ``build``: the CUDA version it was built for, None without; ``cards``: (name, capability);
    ``targets``: what its own kernels are compiled for ("sm_80", "compute_90"), () where it does not say."""

    build: str | None
    usable: bool
    cards: tuple[tuple[str, tuple[int, int]], ...] = ()
    targets: tuple[str, ...] = ()


def look() -> Cards:
    """Ask torch."""
    build = getattr(torch.version, "cuda", None)
    if build is None or not torch.cuda.is_available():
        return Cards(build, False)
    found = tuple(
        (torch.cuda.get_device_name(index), torch.cuda.get_device_capability(index))
        for index in range(torch.cuda.device_count())
    )
    return Cards(build, True, found, tuple(torch.cuda.get_arch_list()))


def refusal(index: int, seen: Cards) -> str | None:
    """Why card ``index`` cannot be used, and what to do about it; None if it can."""
    if seen.build is None:
        return "this build of torch has no CUDA support; install a CUDA build of torch"
    if not seen.usable:
        return (
            f"torch, built for CUDA {seen.build}, finds no card that it can use: is there one, and is its driver new "
            "enough? (`batchgen-lite doctor` says more)"
        )
    if index >= len(seen.cards):
        names = ", ".join(f"cuda:{number} {name}" for number, (name, _) in enumerate(seen.cards))
        return f"there is no card {index}; this machine has {names}"
    name, capability = seen.cards[index]
    if capability < OLDEST:
        return (
            f"{name} has compute capability {capability[0]}.{capability[1]}, but {OLDEST[0]}.{OLDEST[1]} is the oldest "
            "that is served"
        )
    if seen.targets and not any(_serves(target, capability) for target in seen.targets):
        return (
            f"{name} has compute capability {capability[0]}.{capability[1]}, for which this build of torch has no "
            f"kernels (it has {', '.join(seen.targets)}); install a build that has them"
        )
    return None


def _serves(target: str, capability: tuple[int, int]) -> bool:
    """Whether code compiled for ``target`` runs on a card: machine code within its major version, from its minor
    version on ("a" at its end: on that very version only); "compute", which the driver translates, on all newer."""
    parts = re.fullmatch(r"(sm|compute)_(\d+)(\d)([a-z]?)", target)
    if parts is None:
        return False
    oldest = (int(parts[2]), int(parts[3]))
    if parts[4] == "a":
        return capability == oldest
    if parts[1] == "compute":
        return capability >= oldest
    return capability[0] == oldest[0] and capability >= oldest


def open_cuda(index: int, vram: int | None) -> CudaDevice:
    """Card ``index`` with at most ``vram`` bytes of its memory (None: what it can spare).

    Raises UsageError, with the reason, for a card that cannot be used; BudgetError for a ``vram`` that cannot be.
    """
    seen = look()
    reason = refusal(index, seen)
    if reason is not None:
        raise UsageError(f"--device cuda:{index} cannot be used: {reason}, or use --device cpu")
    from batchgen_lite.offload.devices.cuda_streams import TorchStreams

    card, capability = seen.cards[index]
    torch.cuda.set_device(index)  # what names no device means this one, in every thread that never says otherwise
    return CudaDevice(TorchStreams(index), vram=vram, name=f"cuda:{index}", card=card, capability=capability)
