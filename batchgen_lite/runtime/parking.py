"""Where sequence coroutines wait for their sweep, and how the driver knows that all of them wait again."""

from __future__ import annotations

import asyncio

from batchgen_lite.runtime.interface import SampledToken

Ticket = asyncio.Future[SampledToken | None]


class Parking:
    """Counts coroutines that are awake. A sweep begins only when none is: then every sequence has said what it wants.

    Costs one future and one task switch per sequence and sweep, 4 to 8 microseconds.
    """

    def __init__(self) -> None:
        self._awake = 0
        self._all_parked = asyncio.Event()
        self._all_parked.set()

    def woken(self) -> None:
        """A coroutine has been started or its ticket resolved."""
        self._awake += 1
        self._all_parked.clear()

    def left(self) -> None:
        """A coroutine waits again, or has ended."""
        self._awake -= 1
        if self._awake == 0:
            self._all_parked.set()

    async def wait(self) -> None:
        """Until every coroutine is parked or has ended."""
        await self._all_parked.wait()
