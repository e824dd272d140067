"""Experts side by side: each on one core, taken from a queue, where otherwise all cores would share every operation.

An expert of a few dozen rows is some twenty operations of some tens of microseconds. Shared by all cores, each of them
ends when the slowest core is done, and in the Python between them the other cores go to sleep. With an expert a core
nobody waits for anybody until the queue is empty, and a core that something else uses now and then (a browser, the
kernel's part of a read) delays its own experts alone.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterable

import torch

from batchgen_lite.kernels.products import USES_ONEDNN
from batchgen_lite.offload.tiles import Module
from batchgen_lite.runtime.widened_tiles import cheap

Work = Callable[[int], None]
"""Done by the worker of this number."""


def workers_for(modules: Iterable[Module], threads: int) -> int:
    """How many experts are computed at a time with ``threads`` compute threads; 1: one, by all of them.

    One as well where products are not oneDNN's, whose bits do not depend on threads, and where widening needs memory of
    its own on every core (packed formats), which no account holds."""
    routed = [tile for module in modules if module.routed for tile in module.tiles]
    return threads if USES_ONEDNN and routed and all(cheap(tile) for tile in routed) else 1


class WorkerFailed(RuntimeError):
    """Another worker has failed, so what this one waits for will not come."""


class ExpertWorkers:
    """``count`` threads that torch computes on alone. One owner, whose calls all come from one thread."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._queue: queue.SimpleQueue[tuple[Work, Callable[[], None]] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._changed = threading.Condition()
        self._left = 0
        self._idle_since = 0.0  # of time.perf_counter
        self._error: BaseException | None = None

    def submit(self, work: Work, done: Callable[[], None]) -> None:
        """Have ``work`` done, in the order of submission; ``done`` is called in any case, and where another
        has failed before, nothing else."""
        if not self._threads:
            self._start()
        with self._changed:
            self._left += 1
        self._queue.put((work, done))

    def join(self) -> None:
        """Wait until all is done; raises the first error, once."""
        with self._changed:
            self._changed.wait_for(lambda: self._left == 0)
            error, self._error = self._error, None
        if error is not None:
            raise error

    def settle(self) -> None:
        """Wait until all is done, whether it fails or not."""
        with contextlib.suppress(BaseException):
            self.join()

    def idle_since(self) -> float | None:
        """The reading of time.perf_counter at which the last work was done; None while there is some."""
        with self._changed:
            return None if self._left else self._idle_since

    @property
    def failed(self) -> bool:
        """Whether some work since the last ``join`` has raised."""
        return self._error is not None

    def _start(self) -> None:
        """The threads, which torch gives one core each; the caller keeps as many as it has."""
        threads = torch.get_num_threads()
        ready = threading.Barrier(self.count + 1)
        for worker in range(self.count):
            thread = threading.Thread(target=self._run, args=(worker, ready), name=f"experts {worker}", daemon=True)
            self._threads.append(thread)
            thread.start()
        ready.wait()
        torch.set_num_threads(threads)  # each worker has set its own, and with it what threads to come begin with

    def _run(self, worker: int, ready: threading.Barrier) -> None:
        torch.get_num_threads()  # torch gives a thread the process's number when that is first asked for
        torch.set_num_threads(1)
        ready.wait()
        with torch.inference_mode():
            while (item := self._queue.get()) is not None:
                self._do(worker, *item)
                del item  # nothing of it is kept until the next one comes

    def _do(self, worker: int, work: Work, done: Callable[[], None]) -> None:
        try:
            if self._error is None:
                work(worker)
        except BaseException as error:  # raised where the work was ordered
            with self._changed:
                self._error = self._error or error
        finally:
            done()
            with self._changed:
                self._left -= 1
                self._idle_since = time.perf_counter()
                if not self._left:
                    self._changed.notify_all()

    def close(self) -> None:
        """End the threads, after what is queued. Idempotent."""
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join()
        self._threads.clear()


class InOrder:
    """Steps that come out of order and are taken in the order of their numbers, 0 first, by whoever brings the next."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._steps: dict[int, Callable[[], None]] = {}
        self._next = 0
        self._taking = False

    def bring(self, number: int, step: Callable[[], None]) -> None:
        """Take ``step`` as soon as all of smaller numbers have been, here or where the last of them is brought."""
        with self._lock:
            self._steps[number] = step
            if self._taking:
                return
            self._taking = True
        while True:
            with self._lock:
                following = self._steps.pop(self._next, None)
                if following is None:
                    self._taking = False
                    return
                self._next += 1
            following()
