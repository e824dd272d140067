"""Named accounts that every large allocation is drawn from, so that a budget holds and a summary can explain it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from batchgen_lite.errors import BudgetError
from batchgen_lite.offload.budget import format_size


@dataclass(frozen=True, slots=True)
class Account:
    """Bytes of one purpose: held now, and at most so far."""

    name: str
    held: int
    peak: int


class MemoryAccounts:
    """The books of one budget (``option`` is the flag that sets it). Thread-safe. Reserving comes before allocating."""

    def __init__(self, limit: int, *, option: str = "--ram") -> None:
        """``limit`` in bytes."""
        self.limit = limit
        self._option = option
        self._lock = threading.Lock()
        self._held: dict[str, int] = {}
        self._peaks: dict[str, int] = {}
        self._peak = 0

    def reserve(self, name: str, nbytes: int) -> None:
        """Draw ``nbytes`` for ``name``. Raises BudgetError, and draws nothing, if the budget does not have them."""
        if nbytes < 0:
            raise ValueError(f"cannot reserve {nbytes} bytes for {name}")
        with self._lock:
            total = sum(self._held.values()) + nbytes
            if total > self.limit:
                raise BudgetError(self._refusal(name, nbytes, total))
            self._held[name] = self._held.get(name, 0) + nbytes
            self._peaks[name] = max(self._peaks.get(name, 0), self._held[name])
            self._peak = max(self._peak, total)

    def release(self, name: str, nbytes: int) -> None:
        """Give bytes back. Raises ValueError for more than ``name`` holds: the books would be wrong from then on."""
        with self._lock:
            held = self._held.get(name, 0)
            if not 0 <= nbytes <= held:
                raise ValueError(f"cannot release {nbytes} bytes of {name}, which holds {held}")
            self._held[name] = held - nbytes

    @contextmanager
    def holding(self, name: str, nbytes: int) -> Iterator[None]:
        """Reserve for the length of a with block."""
        self.reserve(name, nbytes)
        try:
            yield
        finally:
            self.release(name, nbytes)

    @property
    def held(self) -> int:
        """Bytes drawn now, all accounts together."""
        with self._lock:
            return sum(self._held.values())

    @property
    def free(self) -> int:
        """Bytes that can still be drawn."""
        return self.limit - self.held

    @property
    def peak(self) -> int:
        """The most that was drawn at one moment; less than the sum of the accounts' peaks."""
        with self._lock:
            return self._peak

    def accounts(self) -> tuple[Account, ...]:
        """All accounts, in the order in which they were opened."""
        with self._lock:
            return tuple(Account(name, held, self._peaks[name]) for name, held in self._held.items())

    def _refusal(self, name: str, nbytes: int, total: int) -> str:
        holds = ", ".join(f"{account} {format_size(held)}" for account, held in self._held.items() if held) or "nothing"
        return (
            f"{name} needs {format_size(nbytes)}, but of the budget of {format_size(self.limit)} only "
            f"{format_size(self.limit - total + nbytes)} is left (held: {holds}); {self._option} would have to be "
            f"at least {format_size(total)}"
        )
