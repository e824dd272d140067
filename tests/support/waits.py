"""Finding out whether every wait is needed: run a scenario on the fake stream layer with one of them taken out.

A wait is a line of product code (or of a test) that calls ``Device.wait``, ``Event.synchronize`` or ``Event.done``.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

from fake_streams import FakeEvent

from batchgen_lite.offload.devices.cuda import CudaDevice
from batchgen_lite.offload.devices.protocol import Event, Lane

Site = tuple[str, int, str]
"""File name, line, and what is called there."""


class Waits:
    """The waits that were met, how often, and the one that is left out."""

    def __init__(self, left_out: Site | None = None) -> None:
        self.left_out = left_out
        self.met: Counter[Site] = Counter()
        self.synchronised: Counter[tuple[str, str]] = Counter()
        """(file, function) of whoever made the host wait, and how often."""

    def skips(self, what: str) -> bool:
        frame = sys._getframe(2)
        site = (Path(frame.f_code.co_filename).name, frame.f_lineno, what)
        self.met[site] += 1
        if what == "synchronize":
            self.synchronised[site[0], frame.f_code.co_name] += 1
        return site == self.left_out


@contextmanager
def watched(left_out: Site | None = None) -> Iterator[Waits]:
    """Every wait is noted; ``left_out`` does nothing (``done`` then says yes at once)."""
    waits = Waits(left_out)
    wait, synchronize, done = CudaDevice.wait, FakeEvent.synchronize, FakeEvent.done

    def patched_wait(self: CudaDevice, lane: Lane, event: Event) -> None:
        if not waits.skips(f"wait {lane.value}"):
            wait(self, lane, event)

    def patched_synchronize(self: FakeEvent) -> None:
        if not waits.skips("synchronize"):
            synchronize(self)

    def patched_done(self: FakeEvent) -> bool:
        return waits.skips("done") or done(self)

    with (
        patch.object(CudaDevice, "wait", patched_wait),
        patch.object(FakeEvent, "synchronize", patched_synchronize),
        patch.object(FakeEvent, "done", patched_done),
    ):
        yield waits


Scenario = Callable[[int], bool]
"""Given a seed, whether everything came out right."""


def sites_of(scenario: Scenario, seeds: range) -> set[Site]:
    """Every wait that the scenario meets; it has to come out right under each seed."""
    with watched() as waits:
        for seed in seeds:
            assert scenario(seed), f"wrong with all waits in place, seed {seed}"
    return set(waits.met)


def goes_wrong_without(site: Site, scenario: Scenario, seeds: range) -> bool:
    """Whether some seed shows that the wait is missing, by a wrong result or by an error of any kind."""
    for seed in seeds:
        with watched(site):
            try:
                if not scenario(seed):
                    return True
            except Exception:  # a missing wait may show as anything: a poisoned number, an assertion, a refusal
                return True
    return False
