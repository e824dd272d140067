"""Stopping from outside: the first signal stops cleanly, the second at once."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(BaseException):
    """A signal arrived where there is nothing to wind down. Not an Exception: nothing on the way may swallow it."""


class StopSignals:
    """Handlers for SIGINT, SIGTERM and SIGHUP, while in use as a context manager.

    ``on_stop`` is called from the handler at the first signal; while it is None, ``Interrupted`` is raised there
    instead. A signal that the parent told us to ignore (nohup, a background job of a script) stays ignored."""

    def __init__(self) -> None:
        self.received: int | None = None
        self.on_stop: Callable[[], object] | None = None
        self._before: dict[int, object] = {}

    def __enter__(self) -> StopSignals:
        for number in _SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Inside, a first signal is only noted; behind it, ``Interrupted`` is raised. For steps of a moment that must
        not be cut in two, such as taking a lock and seeing to its release."""
        before, self.on_stop = self.on_stop, lambda: None
        try:
            yield
        finally:
            self.on_stop = before
        if self.received is not None:
            raise Interrupted

    @property
    def exit_code(self) -> int:
        """130 for Ctrl-C, 143 for SIGTERM and SIGHUP."""
        return 130 if self.received in (None, signal.SIGINT) else 143

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None:
            _show_cursor()
            os._exit(self.exit_code)
        self.received = number
        if self.on_stop is None:
            raise Interrupted
        self.on_stop()


def _show_cursor() -> None:
    """A live display hides it; os._exit runs no clean-up."""
    if sys.stderr is not None and sys.stderr.isatty():
        os.write(sys.stderr.fileno(), b"\x1b[?25h\n")
