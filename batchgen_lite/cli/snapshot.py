"""What a display shows: the job's rows joined with the engine's figures."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from batchgen_lite.offload.budget import format_size
from batchgen_lite.runtime.interface import Progress

if TYPE_CHECKING:
    from batchgen_lite.jobs.job import Counts

BOUNDS = {"disk": "disk-bound", "compute": "compute-bound", "kv": "KV-bound"}


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One moment of a run. Rates as in ``Progress``: tokens/s and bytes/s."""

    rows: Counts
    engine: Progress

    def fields(self) -> dict[str, Any]:
        """Flat, for machines; also the live status in the lock file."""
        engine = self.engine
        return dataclasses.asdict(self.rows) | {
            "running": engine.rows_running,
            "tokens_prefilled": engine.tokens_prefilled,
            "tokens_decoded": engine.tokens_decoded,
            "tokens_per_second": round(engine.decode_rate, 2),
            "read_bytes_per_second": round(engine.read_rate),
            "sweeps": engine.sweeps,
            "bound_by": engine.bound_by or None,
            "eta_seconds": None if engine.eta_seconds is None else round(engine.eta_seconds, 1),
        }

    def parts(self) -> list[str]:
        """Short pieces of text: failures, rates, bound, ETA. Unknown ones are left out."""
        engine = self.engine
        parts = [f"{self.rows.failed} failed"] if self.rows.failed else []
        if engine.decode_rate:
            parts.append(f"{rate(engine.decode_rate)} tok/s")
        if engine.read_rate:
            parts.append(f"{size(engine.read_rate)}/s")
        if engine.bound_by:
            parts.append(BOUNDS.get(engine.bound_by, engine.bound_by))
        if engine.eta_seconds is not None:
            parts.append(f"ETA {duration(engine.eta_seconds)}")
        return parts


def rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def duration(seconds: float) -> str:
    """ "4.2 s", "3:07", "2:03:04"; days are hours too."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def size(nbytes: float) -> str:
    """Binary units, as budgets are given: one system for sizes and rates, or they could not be compared."""
    return format_size(round(nbytes))
