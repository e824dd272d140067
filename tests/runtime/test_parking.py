from __future__ import annotations

import asyncio

import pytest

from batchgen_lite.runtime.interface import SampledToken
from batchgen_lite.runtime.parking import PARKED, resume


def test_a_coroutine_runs_from_sweep_to_sweep() -> None:
    heard: list[SampledToken | str | None] = []

    async def sequence() -> None:
        heard.append("begun")
        heard.append(await PARKED)
        heard.append(await PARKED)

    coroutine = sequence()
    assert heard == []
    resume(coroutine, None)
    resume(coroutine, None)  # a part of a prompt went by
    assert heard == ["begun", None]
    resume(coroutine, SampledToken(7))
    assert heard == ["begun", None, SampledToken(7)]


def test_an_error_reaches_it_where_it_waits() -> None:
    caught: list[Exception] = []

    async def sequence() -> None:
        try:
            await PARKED
        except ValueError as error:
            caught.append(error)

    coroutine = sequence()
    resume(coroutine, None)
    resume(coroutine, ValueError("no room"))
    assert [str(error) for error in caught] == ["no room"]


def test_waiting_for_anything_else_is_a_bug_that_shows() -> None:
    async def sequence() -> None:
        await asyncio.sleep(0)

    with pytest.raises(RuntimeError, match="may wait for sweeps only"):
        resume(sequence(), None)
