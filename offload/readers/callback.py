"""Telling the owner of a submission that it is done."""

from __future__ import annotations

import threading
from collections.abc import Callable

Done = Callable[[BaseException | None], None]


def report(done: Done, error: BaseException | None) -> None:
    """Call ``done`` from a reader's thread. A callback that raises must not take the thread with it: its fault is
    reported as that of any thread is, through ``threading.excepthook``."""
    try:
        done(error)
    except Exception as fault:
        threading.excepthook(threading.ExceptHookArgs((type(fault), fault, fault.__traceback__, None)))
