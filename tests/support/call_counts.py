"""How many calls a run takes: what its time would tell on a machine that does nothing else."""

from __future__ import annotations

import asyncio
import sys
from types import FrameType

from batchgen_lite.runtime.engine import Run


def calls_of(run: Run) -> int:
    """Calls, of Python and of C, from the first admission of ``run`` to its last record."""
    count = 0

    def note(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    async def drive() -> None:
        sys.setprofile(note)
        try:
            await run.drive()
        finally:
            sys.setprofile(None)

    asyncio.run(drive())
    return count
