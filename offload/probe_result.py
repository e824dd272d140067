"""What a probe found, and its form in the cache."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class ReaderSetting:
    """How to open a reader: kind ("direct", "buffered", "kvikio"), threads, and bytes per read."""

    kind: str
    threads: int
    block_bytes: int


@dataclass(frozen=True, slots=True)
class Trial:
    """One measurement: bytes/s read while ``compute_threads`` reached ``flops`` FLOP/s (fp32 matrix products)."""

    setting: ReaderSetting
    compute_threads: int
    read_rate: float
    flops: float


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """What to use, and the rates it reaches while disk and cores both work; ``flops_alone``: the same threads' while
    nothing is read.

    ``source``: "measured", "cached", or "default" (too little to measure; the rates are then 0). ``disturbance``: the
    share of the cores' time that other processes (or the hypervisor) took meanwhile; from ``probe.DISTURBED`` on the
    figures say more about them than about the machine.
    """

    setting: ReaderSetting
    compute_threads: int
    read_rate: float  # bytes/s
    flops: float  # FLOP/s
    bytes_read: int
    seconds: float
    taken_at: float  # seconds since 1970
    source: str
    disturbance: float = 0.0
    flops_alone: float = 0.0  # FLOP/s
    trials: tuple[Trial, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> ProbeResult:
        """The result that ``to_json`` wrote, now of source "cached". Raises KeyError, TypeError or ValueError for
        anything else."""
        trials = tuple(
            Trial(_setting(t["setting"]), _positive(t["compute_threads"]), float(t["read_rate"]), float(t["flops"]))
            for t in data["trials"]
        )
        return cls(
            setting=_setting(data["setting"]),
            compute_threads=_positive(data["compute_threads"]),
            read_rate=float(data["read_rate"]),
            flops=float(data["flops"]),
            bytes_read=int(data["bytes_read"]),
            seconds=float(data["seconds"]),
            taken_at=float(data["taken_at"]),
            source="cached",
            disturbance=float(data["disturbance"]),
            flops_alone=float(data["flops_alone"]),
            trials=trials,
        )


def _setting(data: dict[str, Any]) -> ReaderSetting:
    return ReaderSetting(str(data["kind"]), _positive(data["threads"]), _positive(data["block_bytes"]))


def _positive(value: Any) -> int:
    number = int(value)
    if number < 1:
        raise ValueError(f"{number} is not positive")
    return number
