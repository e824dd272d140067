"""What a run tells its user: progress while it goes, figures at its end."""

from __future__ import annotations

from dataclasses import replace

from batchgen_lite.offload.budget import MIB, format_size
from batchgen_lite.offload.budget_accounts import MemoryAccounts
from batchgen_lite.offload.pages import PAGE_TOKENS
from batchgen_lite.runtime.cost import SweepCost, page_visits, remaining_seconds
from batchgen_lite.runtime.engine import Run
from batchgen_lite.runtime.interface import Progress, RunSummary
from batchgen_lite.runtime.runner import CpuRunner
from batchgen_lite.runtime.stats import RunStatistics

BOUND_SHARE = 0.25  # of the sweeps' time spent waiting for reads, from which the disk is what bounds a run


def progress_of(run: Run, runner: CpuRunner, cost: SweepCost, group: int) -> Progress:
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
        bound_by="" if statistics.sweeps == 0 else "disk" if waited > BOUND_SHARE else "compute",
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


def summary_of(statistics: RunStatistics, runner: CpuRunner, accounts: MemoryAccounts, peak: int) -> RunSummary:
    """The figures of a finished run. ``accounts``: the books of its budget; ``peak``: bytes of the whole process."""
    stream, reads = runner.stream.statistics, runner.reader_statistics()
    wall = (statistics.ended or statistics.started) - statistics.started
    sweeps = max(1, statistics.sweeps)
    return RunSummary(
        wall_seconds=wall,
        tokens_prefilled=statistics.prefilled,
        tokens_decoded=statistics.decoded,
        sweeps=statistics.sweeps,
        bytes_read=reads.bytes_read,
        expert_reads=stream.expert_reads,
        unrouted_expert_reads=stream.unrouted_expert_reads,
        peak_ram_bytes=peak,
        ram_budget_bytes=accounts.limit,
        stopped_early=statistics.stopped_early,
        extra={
            "memory": account_line(accounts),
            "per sweep": f"{format_size(reads.bytes_read // sweeps)} read, "
            f"{stream.expert_reads / sweeps:.0f} routed experts read once each, "
            f"{stream.unrouted_expert_reads / sweeps:.1f} read without being routed to",
            "batch": f"{statistics.decoded / sweeps:.0f} tokens sampled per sweep, "
            f"{statistics.most_sequences} sequences at most, {statistics.evictions} evictions",
            "link": f"{format_size(int(reads.bytes_per_second))}/s while reading; "
            f"the cores waited {stream.wait_seconds:.1f} s of {statistics.sweep_seconds:.1f} s for it",
        },
    )
