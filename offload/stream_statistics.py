"""What a stream of weights has done so far: bytes, experts, waiting."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class StreamStatistics:
    """Totals since the stream was made. Expert reads count (layer, expert) pairs brought from the disk."""

    bytes_read: int = 0
    expert_reads: int = 0
    unrouted_expert_reads: int = 0
    resident_bytes: int = 0
    wait_seconds: float = 0.0  # the consumer waited for a read: the link was the bottleneck
    router_wait_modules: int = 0  # expert modules that were read only after their router had spoken
    read_ahead_modules: int = 0
    copied_bytes: int = 0  # from host to device memory
