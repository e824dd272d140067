"""KV pages given up for resident weights on the CPU, where both lie in the process's own memory (see tail.py).

The order keeps the budget at every moment: held pages beyond the new end are copied below it, the memory behind it goes
back to the operating system, and only then are more tiles declared resident, of at most as many bytes. Each is read
into its place by the next sweep that needs it, instead of into the ring, so nothing is read twice.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Executor

from batchgen_lite.errors import BudgetError
from batchgen_lite.offload.arena import PAGE
from batchgen_lite.offload.budget_accounts import MemoryAccounts
from batchgen_lite.offload.devices.host import HostMemory
from batchgen_lite.offload.kv import KVPool
from batchgen_lite.offload.pages import BlockTable, PageAllocator
from batchgen_lite.offload.residents import choose_tiles
from batchgen_lite.offload.stream import WeightStream
from batchgen_lite.offload.tiles import Tile
from batchgen_lite.runtime.planner import KV_ACCOUNT, RESIDENTS_ACCOUNT
from batchgen_lite.runtime.tail import least_step


class PoolToWeights:
    """Owns nothing; the engine's thread calls everything, between sweeps. ``given_up``: bytes that the pool has given
    back, ``grown``: bytes that residents took of them; 0 again after ``undo``."""

    def __init__(
        self,
        pool: KVPool,
        memory: HostMemory,
        allocator: PageAllocator,
        stream: WeightStream,
        residents: Sequence[Tile],
        size: Callable[[Tile], int],
    ) -> None:
        """``memory``: what ``pool`` lies in; ``residents``: the tiles of ``stream`` that stay in memory already;
        ``size``: bytes that a resident tile takes."""
        self.given_up = self.grown = 0
        self._pool, self._memory, self._allocator, self._stream = pool, memory, allocator, stream
        self._size = size
        self._residents_at_first = tuple(residents)
        self._pages_at_first = allocator.capacity
        self._page_bytes = pool.page_bytes
        self._refused = False
        self._residents: list[Tile] = []
        self._smallest = 0  # bytes of the smallest tile that still streams, 0 if none does
        self._keep(self._residents_at_first)

    def worth(self, pages: int) -> bool:
        """Whether it is worth a step to keep only ``pages`` pages: enough of them go, and a tile fits there."""
        freed = self._allocator.capacity - pages
        if self._refused or not self._smallest or freed < least_step(self._pages_at_first, self._page_bytes):
            return False
        return freed * self._page_bytes + self.given_up - self.grown >= self._smallest

    def step(self, pages: int, tables: Sequence[BlockTable], accounts: MemoryAccounts) -> int:
        """Keep ``pages`` pages, to which ``tables`` (all that hold any) are renumbered. Returns the bytes of tiles that
        are resident from now on; 0, and nothing has changed, if no tile fits into what would be freed."""
        ranges = self._pool.ranges(pages)
        given_up = sum(self._memory.releasable(*span) for span in ranges)
        # A page for the end of the new tiles' memory.
        tiles = choose_tiles(self._stream.modules, given_up - self.grown - PAGE, self._size, self._residents)
        if not tiles:
            return 0
        moves = self._allocator.shrink(pages)
        self._pool.move(moves)
        for table in tables:
            table.renumber(moves)
        for span in ranges:
            self._memory.release(*span)
        accounts.release(KV_ACCOUNT, given_up - self.given_up)
        self.given_up = given_up
        grown = sum(map(self._size, tiles)) + PAGE
        accounts.reserve(RESIDENTS_ACCOUNT, grown)
        try:
            self._stream.keep(tiles)
        except BudgetError:  # address space is short: the run goes on as it is
            accounts.release(RESIDENTS_ACCOUNT, grown)
            self._refused = True
            return 0
        self.grown += grown
        self._keep(tiles)
        return grown

    def undo(self, accounts: MemoryAccounts) -> None:
        """The division is what it was at first; the pool's pages beyond are free. For the next job."""
        if self.given_up:
            self._stream.keep_no_more()
            accounts.release(RESIDENTS_ACCOUNT, self.grown)
            accounts.reserve(KV_ACCOUNT, self.given_up)
            self._allocator.grow(self._pages_at_first)
        self.given_up = self.grown = 0
        self._refused = False
        self._residents.clear()
        self._keep(self._residents_at_first)

    def _keep(self, tiles: Sequence[Tile]) -> None:
        self._residents += tiles
        kept = set(map(id, self._residents))
        streamed = (tile for module in self._stream.modules for tile in module.tiles if id(tile) not in kept)
        self._smallest = min(map(self._size, streamed), default=0)


class AdaptingTail:
    """Implements TailMemory. ``engine``: the thread that owns the pool; ``grown`` is told of bytes that became
    resident."""

    def __init__(
        self, exchange: PoolToWeights, engine: Executor, accounts: MemoryAccounts, grown: Callable[[int], None]
    ) -> None:
        self._exchange, self._engine, self._accounts, self._grown = exchange, engine, accounts, grown

    async def keep_pages(self, pages: int, tables: Sequence[BlockTable]) -> None:
        """See TailMemory.keep_pages."""
        if not self._exchange.worth(pages):
            return
        loop = asyncio.get_running_loop()
        nbytes = await loop.run_in_executor(self._engine, self._exchange.step, pages, tables, self._accounts)
        if nbytes:
            self._grown(nbytes)
