"""What ``--device auto`` means on this machine: a card that serves, else the CPU, with the reason. Torch-free where no
CUDA driver is."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

CUDA_NODES = (Path("/dev/nvidiactl"), Path("/dev/dxg"))
"""One of them is there wherever a CUDA driver is: torch is asked only then, as importing it takes seconds."""


@dataclass(frozen=True, slots=True)
class Automatic:
    """``card``: number of the card to take, None = the CPU; ``reason``: why no card although a driver is there, as
    clauses for a message, else ""."""

    card: int | None = None
    reason: str = ""


def automatic() -> Automatic:
    """The first card that can be used, looked for each time."""
    if not any(node.exists() for node in CUDA_NODES):
        return Automatic()
    from batchgen_lite.offload.devices.open_cuda import look, refusal

    seen = look()
    reasons = []
    for index in range(max(1, len(seen.cards))):
        reason = refusal(index, seen)
        if reason is None:
            return Automatic(index)
        reasons.append(reason)
    return Automatic(reason="; ".join(dict.fromkeys(reasons)))
