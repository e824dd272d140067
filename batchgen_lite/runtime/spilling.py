"""Sequences whose KV goes to the spill file: the disk as the engine's lower tier, and what a run says of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from copy import deepcopy

from batchgen_lite.offload.budget import format_size
from batchgen_lite.offload.probe_disk import disk_of
from batchgen_lite.offload.spill import Spill
from batchgen_lite.offload.spill_file import SpillStatistics
from batchgen_lite.runtime.cost import SweepCost
from batchgen_lite.runtime.migration import MigrationChoice, Tier, TierState
from batchgen_lite.runtime.sequence import Sequence


class SpilledSequences:
    """Implements LowerTiers. ``engine``: the thread that owns the pool, idle between sweeps; ``cost``: of sweeps as
    calibrated by now; ``group`` query heads share a KV head."""

    def __init__(self, spill: Spill, engine: Executor, cost: Callable[[], SweepCost], group: int) -> None:
        self.page_bytes = spill.page_bytes
        self._spill = spill
        self._engine = engine
        self._cost = cost
        self._group = group

    def choice(self) -> MigrationChoice:
        """See LowerTiers.choice."""
        state = TierState(Tier.DISK, self._spill.free_pages, self._spill.seconds_per_page)
        return MigrationChoice((state,), self._cost(), self._group)

    async def hold(self, sequence: Sequence, tier: Tier) -> bool:
        """See LowerTiers.hold."""
        table = sequence.table
        return await asyncio.get_running_loop().run_in_executor(
            self._engine, self._spill.hold, sequence.index, tuple(table.pages), table.length
        )

    async def restore(self, sequence: Sequence) -> bool:
        """See LowerTiers.restore."""
        return await asyncio.get_running_loop().run_in_executor(
            self._engine, self._spill.restore, sequence.index, tuple(sequence.table.pages)
        )

    def forget(self, sequence: Sequence) -> None:
        """See LowerTiers.forget."""
        self._spill.forget(sequence.index)


def spill_totals(spill: Spill | None) -> SpillStatistics:
    """A copy of the totals so far, to compare with later."""
    return SpillStatistics() if spill is None else deepcopy(spill.file.statistics)


def spill_place(spill: Spill) -> str:
    """Where the file lies, for the plan."""
    file = spill.file
    disk = disk_of(file.path.parent)
    note = " (in memory, beside --ram)" if disk.kind == "memory" else "" if file.direct else " (without direct IO)"
    return f"up to {format_size(file.limit)} in {file.path.parent}{note}"


def spill_line(spill: Spill, before: SpillStatistics, holds: int) -> str:
    """What a run spilled, and what went wrong, for its summary."""
    now = spill.file.statistics
    written, read = now.bytes_written - before.bytes_written, now.bytes_read - before.bytes_read
    text = f"{holds} pauses kept their KV, {format_size(written)} written, {format_size(read)} read back"
    for reason, count in now.problems.items():
        count -= before.problems.get(reason, 0)
        if count:
            text += f"; {reason} ({'once' if count == 1 else f'{count} times'}): computed again"
    return text
