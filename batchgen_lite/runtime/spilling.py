"""Sequences whose KV goes to a lower tier: host memory below a device of its own, and the spill file below both."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from copy import deepcopy

from batchgen_lite.offload.budget import format_size
from batchgen_lite.offload.probe_disk import disk_of
from batchgen_lite.offload.spill import Spill
from batchgen_lite.offload.spill_file import SpillFile, SpillStatistics
from batchgen_lite.runtime.cost import SweepCost
from batchgen_lite.runtime.migration import MigrationChoice, Tier, TierState
from batchgen_lite.runtime.sequence import Sequence

Tiers = Mapping[Tier, Spill]
Totals = Mapping[Tier, SpillStatistics]


class SpilledSequences:
    """Implements LowerTiers. ``engine``: the thread that owns the pool, idle between sweeps; ``cost``: of sweeps as
    calibrated by now; ``group`` query heads share a KV head."""

    def __init__(self, tiers: Tiers, engine: Executor, cost: Callable[[], SweepCost], group: int) -> None:
        self.page_bytes = next(iter(tiers.values())).page_bytes
        self._tiers = tiers
        self._engine = engine
        self._cost = cost
        self._group = group
        self._where: dict[int, Spill] = {}

    def choice(self) -> MigrationChoice:
        """See LowerTiers.choice."""
        states = [TierState(tier, spill.free_pages, spill.seconds_per_page) for tier, spill in self._tiers.items()]
        return MigrationChoice(tuple(states), self._cost(), self._group)

    async def hold(self, sequence: Sequence, tier: Tier) -> bool:
        """See LowerTiers.hold."""
        table, spill = sequence.table, self._tiers[tier]
        self._where[sequence.index] = spill
        return await asyncio.get_running_loop().run_in_executor(
            self._engine, spill.hold, sequence.index, tuple(table.pages), table.length
        )

    async def restore(self, sequence: Sequence) -> bool:
        """See LowerTiers.restore."""
        spill = self._where.pop(sequence.index)
        return await asyncio.get_running_loop().run_in_executor(
            self._engine, spill.restore, sequence.index, tuple(sequence.table.pages)
        )

    def forget(self, sequence: Sequence) -> None:
        """See LowerTiers.forget."""
        spill = self._where.pop(sequence.index, None)
        if spill is not None:
            spill.forget(sequence.index)


def spill_totals(tiers: Tiers) -> Totals:
    """A copy of the totals so far, to compare with later."""
    return {tier: deepcopy(spill.store.statistics) for tier, spill in tiers.items()}


def spill_places(tiers: Tiers) -> dict[str, str]:
    """Label -> where held KV goes, for the plan."""
    lines = {}
    for tier, spill in tiers.items():
        if isinstance(spill.store, SpillFile):
            file = spill.store
            disk = disk_of(file.path.parent)
            note = " (in memory, beside --ram)" if disk.kind == "memory" else "" if file.direct else " (buffered)"
            lines[_LABELS[tier]] = f"up to {format_size(file.limit)} in {file.path.parent}{note}"
        else:
            lines[_LABELS[tier]] = f"{spill.free_pages} pages of rows that wait"
    return lines


def spill_lines(tiers: Tiers, before: Totals) -> dict[str, str]:
    """Label -> what a run held in each tier, and what went wrong, for its summary."""
    return {_LABELS[tier]: _line(spill.store.statistics, before[tier]) for tier, spill in tiers.items()}


_LABELS = {Tier.HOST: "KV held", Tier.DISK: "KV spill"}


def _line(now: SpillStatistics, before: SpillStatistics) -> str:
    written, read = now.bytes_written - before.bytes_written, now.bytes_read - before.bytes_read
    holds = now.holds - before.holds
    text = f"{holds} pauses kept their KV, {format_size(written)} written, {format_size(read)} read back"
    for reason, count in now.problems.items():
        count -= before.problems.get(reason, 0)
        if count:
            text += f"; {reason} ({'once' if count == 1 else f'{count} times'}): computed again"
    return text
