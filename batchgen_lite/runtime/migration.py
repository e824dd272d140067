"""Where a paused sequence's KV goes: to a lower tier, or to token ids, whichever costs less time. Torch-free.

    keeping it       seconds to write its pages and to read them back, while everything else waits
    dropping it      seconds by which the sweeps that prefill it again take longer

A sweep that waits for the disk prefills within its slack for nothing, so short contexts and quick cores speak for
dropping, long contexts and slow cores for keeping. Nothing here decides a bit of any result.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from math import ceil
from typing import Protocol

from batchgen_lite.offload.pages import PAGE_TOKENS, pages_for
from batchgen_lite.runtime.cost import SweepCost, SweepLoad, page_visits
from batchgen_lite.runtime.sequence import Sequence


class Tier(Enum):
    """A lower tier, where KV of HELD sequences lies."""

    HOST = "host"  # memory below a separate device's
    DISK = "disk"  # the spill file


@dataclass(frozen=True, slots=True)
class TierState:
    """Room in a tier at present, in pages, and the seconds to take one page there and to bring it back."""

    tier: Tier
    free_pages: int
    seconds_per_page: float


@dataclass(frozen=True, slots=True)
class MigrationChoice:
    """What a choice follows from: the tiers there are, fastest first, and the cost of sweeps; ``group`` query heads
    share a KV head."""

    tiers: tuple[TierState, ...]
    cost: SweepCost
    group: int = 1

    def choose(self, positions: int, free: dict[Tier, int], load: SweepLoad, token_budget: int) -> Tier | None:
        """The tier for a sequence of ``positions`` computed positions, None = drop it to token ids. ``free``: pages
        still free in each tier; ``load``: of the sweeps that would prefill it again beside their own work, within
        ``token_budget`` tokens each."""
        pages = pages_for(positions)
        dropping = prefill_again_seconds(self.cost, positions, load, token_budget, self.group)
        best, least = None, dropping
        for state in self.tiers:
            keeping = pages * state.seconds_per_page
            if pages and pages <= free[state.tier] and keeping < least:
                best, least = state.tier, keeping
        return best


def prefill_again_seconds(cost: SweepCost, positions: int, load: SweepLoad, token_budget: int, group: int) -> float:
    """Seconds by which sweeps of ``load`` take longer if ``positions`` tokens of one sequence are computed beside it,
    as many a sweep as ``token_budget`` leaves."""
    if positions <= 0:
        return 0.0
    sweeps = ceil(positions / max(1.0, token_budget - load.tokens))
    visits = page_visits(0, positions, group, PAGE_TOKENS)
    fuller = SweepLoad(load.tokens + positions / sweeps, load.sampled, load.visits + visits / sweeps)
    return sweeps * (cost.seconds(fuller) - cost.seconds(load))


class LowerTiers(Protocol):
    """Carries sequences' KV to lower tiers and back, for the engine. ``page_bytes``: of one page in all layers."""

    page_bytes: int

    def choice(self) -> MigrationChoice:
        """What the next plan may choose from."""
        ...

    async def hold(self, sequence: Sequence, tier: Tier) -> bool:
        """Copy the committed positions of a running sequence to ``tier``; its pages may be freed afterwards. False:
        it could not be done (no room, a write failed), nothing is kept there, and the reason has been noted."""
        ...

    async def restore(self, sequence: Sequence) -> bool:
        """Fill the pages of a HELD sequence's table, reserved for ``sequence.held`` positions, with what was held;
        nothing is kept afterwards. False: what came back is not what was held, and the reason has been noted."""
        ...

    def forget(self, sequence: Sequence) -> None:
        """Whatever is kept of it is not wanted any more. Harmless for a sequence of which nothing is."""
        ...
