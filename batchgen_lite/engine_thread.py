"""An engine's run in a thread and event loop of its own, so that callers may have a loop already (notebooks)."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable

from batchgen_lite.runtime.interface import Engine, Progress, RequestSource, RunSummary

_PROGRESS_SECONDS = 0.25
_POLL_SECONDS = 0.2


class EngineThread:
    """One run. ``on_end`` is called from the thread when it is over, well or not; ``result`` tells which."""

    def __init__(
        self,
        engine: Engine,
        source: RequestSource,
        *,
        on_end: Callable[[], object] = lambda: None,
        on_progress: Callable[[Progress], object] | None = None,
    ) -> None:
        self._engine = engine
        self._source = source
        self._on_end = on_end
        self._on_progress = on_progress
        self._summary = RunSummary()
        self._error: BaseException | None = None
        self._started = self._running = self._stopping = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._main, name="batchgen-run", daemon=True)

    def start(self) -> None:
        self._started = True
        self._thread.start()

    def result(self) -> RunSummary:
        """Wait for the end; raise what the run raised."""
        while self._thread.is_alive():
            self._thread.join(_POLL_SECONDS)  # in pieces: Ctrl-C reaches the main thread between them
        if self._error is not None:
            raise self._error
        return self._summary

    def stop(self) -> None:
        """End the run if it is still going, and wait until it has."""
        self._stopping = True
        if self._started:
            loop = self._loop
            if loop is not None:
                with contextlib.suppress(RuntimeError):  # the loop has closed: the run is over
                    loop.call_soon_threadsafe(self._stop_in_loop)
            self._thread.join()

    def _stop_in_loop(self) -> None:
        """On the run's own loop, so that a request never comes after the run's end, to stop the next one instead."""
        if self._running:
            self._engine.request_stop()

    def _main(self) -> None:
        try:
            if len(self._source):
                self._summary = asyncio.run(self._run())
        except BaseException as error:  # handed to the caller's thread, whatever it is
            self._error = error
        finally:
            self._on_end()

    async def _run(self) -> RunSummary:
        self._loop = asyncio.get_running_loop()
        if self._stopping:
            return self._summary
        ticker = asyncio.create_task(self._tick())
        self._running = True
        try:
            return await self._engine.run(self._source)
        finally:
            self._running = False
            ticker.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await ticker

    async def _tick(self) -> None:
        while self._on_progress is not None:
            self._on_progress(self._engine.progress())
            await asyncio.sleep(_PROGRESS_SECONDS)
