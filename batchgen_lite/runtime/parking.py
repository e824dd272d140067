"""Where sequence coroutines wait for their sweep.

A sequence is an ``async def`` that waits for one thing only: that the next sweep it is part of has been committed. So
the engine drives it itself, with the coroutine's own ``send``, and no event loop stands between them. A switch into a
sequence and back costs under a microsecond; as an asyncio task, with a future to wait for, it cost ten times that: at
10,000 sequences a tenth of a second between any two sweeps. When ``resume`` returns, the sequence has parked again or
has ended: there is nothing to count and to wait for.
"""

from __future__ import annotations

from collections.abc import Coroutine, Generator

from batchgen_lite.runtime.interface import SampledToken


class Parked:
    """``await PARKED`` hands control back to the engine; it gives the sweep's token, or None if there is none yet."""

    __slots__ = ()

    def __await__(self) -> Generator[Parked, SampledToken | None, SampledToken | None]:
        sampled = yield self
        return sampled


PARKED = Parked()

Parkable = Coroutine[Parked, SampledToken | None, None]
"""A coroutine that waits for nothing but sweeps."""


def resume(coroutine: Parkable, outcome: SampledToken | Exception | None) -> None:
    """Run ``coroutine`` to where it parks next or to its end, with ``outcome`` as what it waited for; None starts it.

    Raises what the coroutine raises, and RuntimeError if it waits for anything else: nobody would wake it.
    """
    try:
        parked = coroutine.throw(outcome) if isinstance(outcome, Exception) else coroutine.send(outcome)
    except StopIteration:
        return
    if parked is not PARKED:
        coroutine.close()
        raise RuntimeError(f"a sequence may wait for sweeps only, not for {parked!r}")
