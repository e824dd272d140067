"""What a run tells its user: progress while it goes, figures at its end."""

from __future__ import annotations

from dataclasses import dataclass, replace

from batchgen_lite.offload.budget import MIB, format_size
from batchgen_lite.offload.budget_accounts import MemoryAccounts
from batchgen_lite.offload.devices.protocol import DeviceMemoryStatistics
from batchgen_lite.offload.pages import PAGE_TOKENS
from batchgen_lite.offload.readers.protocol import ReaderStatistics
from batchgen_lite.offload.stream_statistics import StreamStatistics
from batchgen_lite.runtime.cost import SweepCost, page_visits, remaining_seconds
from batchgen_lite.runtime.engine import Run
from batchgen_lite.runtime.interface import Progress, RunSummary
from batchgen_lite.runtime.measure import IO_BOUND, Shares
from batchgen_lite.runtime.runner import LocalRunner
from batchgen_lite.runtime.stats import RunStatistics


@dataclass(frozen=True, slots=True)
class Before:
    """The totals of reader and stream when a run began; both may have served runs before it."""

    reads: ReaderStatistics
    stream: StreamStatistics

    @classmethod
    def of(cls, runner: LocalRunner) -> Before:
        return cls(runner.reader_statistics(), replace(runner.stream.statistics))


def progress_of(run: Run, runner: LocalRunner, cost: SweepCost, group: int) -> Progress:
    """A snapshot, cheap enough for every display refresh. ``cost``: as calibrated by now; ``group`` query heads share a
    KV head."""
    statistics = run.statistics
    reads = runner.reader_statistics()
    waited = runner.stream.statistics.wait_seconds / statistics.sweep_seconds if statistics.sweep_seconds > 0 else 0.0
    return Progress(
        rows_done=statistics.rows_done,
        rows_failed=statistics.rows_failed,
        rows_total=statistics.rows_total,
        rows_running=run.live_rows,
        tokens_prefilled=statistics.prefilled,
        tokens_decoded=statistics.decoded,
        decode_rate=statistics.decode_rate,
        read_rate=reads.bytes_per_second,
        sweeps=statistics.sweeps,
        bound_by="" if statistics.sweeps == 0 else "disk" if waited > IO_BOUND else "compute",
        eta_seconds=_eta(run, cost, group),
    )


def _eta(run: Run, cost: SweepCost, group: int) -> float | None:
    """Seconds for what is left, by the calibrated cost model; None before the first sweep."""
    statistics = run.statistics
    if statistics.sweeps == 0:
        return None
    limits, allocator = run.runner.limits(), run.runner.allocator
    running = max(1, run.live_rows) if statistics.rows_done else limits.max_sequences
    pages = (allocator.capacity - allocator.free) / max(1, run.live_rows)
    left = replace(run.remaining(), visits=page_visits(0, 1, group, PAGE_TOKENS) * max(1.0, pages))
    return remaining_seconds(cost, left, running, limits.token_budget)


def account_line(accounts: MemoryAccounts) -> str:
    """Where memory goes, the largest first; accounts below a MiB are left out."""
    shown = sorted(accounts.accounts(), key=lambda account: -account.held)
    return ", ".join(f"{account.name} {format_size(account.held)}" for account in shown if account.held >= MIB)


def summary_of(
    statistics: RunStatistics, runner: LocalRunner, accounts: MemoryAccounts, peak: int, shares: Shares, before: Before
) -> RunSummary:
    """The figures of a finished run. ``accounts``: the books of its budget; ``peak``: bytes of the whole process."""
    stream, reads = runner.stream.statistics, runner.reader_statistics()
    wall = (statistics.ended or statistics.started) - statistics.started
    sweeps = max(1, statistics.sweeps)
    bytes_read = reads.bytes_read - before.reads.bytes_read
    routed = stream.expert_reads - before.stream.expert_reads
    unrouted = stream.unrouted_expert_reads - before.stream.unrouted_expert_reads
    vram = runner.device.memory() if runner.device.separate else DeviceMemoryStatistics(0, 0, 0)
    retried = statistics.sweeps_retried
    copied = stream.copied_bytes - before.stream.copied_bytes
    return RunSummary(
        wall_seconds=wall,
        tokens_prefilled=statistics.prefilled,
        tokens_decoded=statistics.decoded,
        sweeps=statistics.sweeps,
        bytes_read=bytes_read,
        expert_reads=routed,
        unrouted_expert_reads=unrouted,
        peak_ram_bytes=peak,
        ram_budget_bytes=accounts.limit,
        peak_vram_bytes=vram.peak,
        vram_budget_bytes=vram.capacity,
        stopped_early=statistics.stopped_early,
        extra={
            "memory": account_line(accounts),
            **({"to the device": f"{format_size(copied // sweeps)} of weights a sweep"} if vram.capacity else {}),
            "per sweep": f"{format_size(bytes_read // sweeps)} read, "
            f"{routed / sweeps:.0f} routed experts read once each, "
            f"{unrouted / sweeps:.1f} read without being routed to",
            "batch": f"{statistics.decoded / sweeps:.0f} tokens sampled per sweep, "
            f"{statistics.most_sequences} sequences at most, {statistics.evictions} evictions",
            **({"sweeps retried": f"{retried}, smaller, as memory was short"} if retried else {}),
            "time went": shares_line(shares),
        },
        measured=shares.figures(),
    )


def note_tail(summary: RunSummary, runner: LocalRunner) -> None:
    """Say what became of KV memory in the run's tail, if anything did."""
    exchange = runner.exchange
    summary.measured["late_resident_bytes"] = 0 if exchange is None else exchange.grown
    if exchange is not None and exchange.grown:
        summary.extra["tail"] = (
            f"{format_size(exchange.grown)} of weights stayed in memory, where KV of rows that had ended was before"
        )


def shares_line(shares: Shares) -> str:
    """Where the time went, in one line."""
    if shares.seconds <= 0:
        return "no sweep was completed"
    parts = [
        f"computing {shares.computing / shares.seconds:.0%}, waiting for weights {shares.waited / shares.seconds:.0%}, "
        f"between sweeps {shares.between / shares.seconds:.1%}"
    ]
    if shares.nbytes:
        parts.append(f"{format_size(int(shares.stream_rate))}/s while reading")
    if shares.link_idle is not None:
        parts.append(f"link idle {shares.link_idle:.1%} of {shares.io_sweeps} IO-bound sweeps")
    parts.append(f"{shares.roofline_share:.2f} of the roofline")
    return "; ".join(parts)
