"""Host memory that copies to a card can use at full speed: arenas pinned in place, or plain ones where that is refused.

An arena of ours is pinned where it lies (cudaHostRegister) rather than allocated by torch's pinned allocator, which
rounds sizes up to powers of two and keeps what it got: a budget would not survive that. Pinning is all or nothing per
arena, because one copy must not span pinned and plain memory. Where it is refused (WSL2 allows about half of its
memory), copies still work, through the driver's own small pinned buffer and at about half the speed.
"""

from __future__ import annotations

from typing import Protocol

from batchgen_lite.offload.arena import Arena
from batchgen_lite.offload.budget import format_size


class Pinner(Protocol):
    """The part of a StreamLayer that pins."""

    def pin(self, address: int, nbytes: int) -> str | None: ...
    def unpin(self, address: int) -> None: ...


class PinnedArena(Arena):
    """An arena that was pinned; unpinned when it is closed. Its pages are all resident from the start."""

    _pinner: Pinner | None = None

    def release(self, start: int, stop: int) -> None:
        """Pinned pages cannot be given back one by one: raises ValueError."""
        raise ValueError(f"[{start}, {stop}) of a pinned arena cannot be released; close it as a whole")

    def close(self) -> None:
        """Unpin, then give the memory back. The caller has seen to it that no copy uses it any more. Idempotent."""
        if self._pinner is not None:
            self._pinner.unpin(self.address)
            self._pinner = None
        super().close()


class PinnedMemory:
    """Makes host arenas, pinned as long as the system allows it. ``refused``: why the last one is not, or ""."""

    def __init__(self, pinner: Pinner) -> None:
        self._pinner = pinner
        self.refused = ""
        self.pinned_bytes = 0
        """Bytes pinned so far, those of closed arenas included."""
        self.plain_bytes = 0

    def arena(self, nbytes: int) -> Arena:
        """``nbytes`` of host memory. Raises BudgetError when the system refuses the address space itself."""
        arena = PinnedArena(nbytes)
        reason = self._pinner.pin(arena.address, nbytes)
        if reason is None:
            arena._pinner = self._pinner
            self.pinned_bytes += nbytes
            return arena
        arena.close()
        self.refused = reason
        self.plain_bytes += nbytes
        return Arena(nbytes)

    def describe(self) -> str:
        """One clause for people: what is pinned, and what is not, why and what to do."""
        if not self.refused:
            return f"{format_size(self.pinned_bytes)} of host memory pinned"
        return (
            f"{format_size(self.plain_bytes)} of host memory not pinned ({self.refused}): copies run at about half "
            "speed; under WSL2 raise memory= in .wslconfig, elsewhere close what else pins memory, or lower --ram"
        )
