"""What the runtime says about itself while it runs, and a listener that forgets it at once.

Whoever does something takes the time before it (``since = recorder.now()``) and reports behind it. All times are
seconds of one monotonic clock. Without --trace or --report the calls end in this class, whose methods do nothing: a
call costs some 50 ns, and there are a few per tile of weights, whose computing takes milliseconds.

Torch-free, and it imports nothing of ours, so that every room may use it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class States:
    """Rows by where they are between two sweeps. ``held``: KV in a lower tier; ``evicted``: only token ids are kept."""

    running: int = 0
    held: int = 0
    evicted: int = 0
    waiting: int = 0
    done: int = 0
    failed: int = 0


class Recorder:
    """Listens and keeps nothing. ``active``: whether anything is kept, for callers whose report itself costs;
    ``memory_bytes``: what it may hold, for the memory budget."""

    active = False
    memory_bytes = 0

    def now(self) -> float:
        """The recorder's clock in seconds; 0 where nothing is kept."""
        return 0.0

    # -- the link: any thread -------------------------------------------------------------------------------------

    def read(self, since: float, nbytes: int, file: int) -> None:
        """A submission to the reader, made at ``since``, is complete: ``nbytes`` of file number ``file``."""

    def copied(self, since: float, nbytes: int, *, inward: bool) -> None:
        """``nbytes`` went from host to device (``inward``) or back."""

    # -- the engine's thread --------------------------------------------------------------------------------------

    def submitted(self, layer: int, expert: int, nbytes: int) -> None:
        """An expert's weights (or a part of them that counts ``expert`` = -1) will be read from the disk."""

    def waited(self, since: float) -> None:
        """The engine had no weights to compute with."""

    def routed(self, layer: int, counts: Sequence[int]) -> None:
        """A router has spoken: tokens per expert of ``layer``."""

    def tile(self, kind: str, layer: int, expert: int, nbytes: int, since: float, *, resident: bool) -> None:
        """One tile of module ``kind`` was computed with; ``expert`` is negative where it belongs to none."""

    def module(self, kind: str, layer: int, tokens: int, since: float) -> None:
        """One module ran on ``tokens`` rows, waiting included."""

    def slice_step(self, after: str, layer: int, tokens: int, since: float) -> None:
        """A slice took its own step behind module ``after``: attention with its KV, or a norm, on ``tokens`` rows."""

    # -- the run's own thread -------------------------------------------------------------------------------------

    def sweep_begins(self, tokens: int, states: States) -> None:
        """A sweep over ``tokens`` tokens is planned and reserved for."""

    def sweep_ends(self, since: float, prefilled: int, decoded: int, sequences: int) -> None:
        """It is committed: ``sequences`` moved on, ``decoded`` of them by a sampled token."""

    def run_ends(self) -> None:
        """A run is over; the time until the next one's first sweep is not the engine's. For who runs several."""

    def kv_moved(self, action: str, since: float, nbytes: int, row: int) -> None:
        """A row's KV was evicted, spilled, restored or copied on write."""

    def finished(self, prompt_tokens: int, generated: int, reason: str) -> None:
        """A row has ended; ``reason`` as in its record, or "failed"."""

    def accounts(self, budget: str, limit: int, held: Mapping[str, int]) -> None:
        """How a memory budget ("--ram", "--vram") of ``limit`` bytes is divided; told again when that changes."""

    def memory(self, resident: int, kv_pages: int) -> None:
        """Bytes of the process and KV pages in use, once a sweep."""


SILENT = Recorder()
