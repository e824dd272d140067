"""The words before and after a run: what will happen, and what has."""

from __future__ import annotations

from collections.abc import Mapping

from batchgen_lite.cli.snapshot import duration, rate, size
from batchgen_lite.jobs.job import Counts, Job
from batchgen_lite.runtime.interface import RunSummary


def plan_lines(job: Job, engine_lines: Mapping[str, str]) -> dict[str, str]:
    """Label -> text for the block before a run."""
    scan, counts = job.scan, job.counts()
    if scan is None:
        return {}
    pending = len(job.source) if job.source is not None else 0
    parts = [f"{counts.total:,}"]
    if job.resumed_rows:
        parts.append(f"{job.resumed_rows:,} done before")
    fresh_failures = counts.done - job.resumed_rows
    if fresh_failures > 0:
        parts.append(f"{fresh_failures:,} settled without the model")
    parts.append(f"{pending:,} to answer")
    source = "standard input" if job.options.input == "-" else job.options.input
    lines = {"input": source, "rows": ", ".join(parts)}
    if pending:
        lines["tokens"] = f"{scan.prompt_tokens:,} in prompts, at most {scan.max_new_tokens:,} to generate"
    lines["output"] = "standard output" if job.claim.scratch is not None else str(job.claim.paths.output)
    lines["model"] = job.text.name
    lines |= engine_lines
    battery = on_battery()
    return lines | ({"note": battery} if battery else {})


def detail_lines(job: Job) -> dict[str, str]:
    """What -v adds: everything that decides the output's bytes, as the manifest has it."""
    if job.manifest is None:
        return {}
    identity = job.manifest.identity
    lines = {"version": job.manifest.tool_version, "seed": str(job.base_seed), "date": job.date}
    lines["sampling"] = _pairs(identity["sampling"]) or "nothing given by flags"
    lines["defaults"] = _pairs(identity["model_sampling_defaults"]) or "the model gives none"
    lines["identity"] = _pairs(identity["model"])
    if job.claim.scratch is None:
        lines["manifest"] = str(job.claim.paths.manifest)
    return lines


def _pairs(values: Mapping[str, object]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())


def on_battery() -> str | None:
    """A warning if the machine runs on battery: the run will be slow and may not last."""
    import psutil

    try:
        battery = psutil.sensors_battery()
    except (AttributeError, OSError):
        return None
    if battery is None or battery.power_plugged is not False:
        return None
    return f"on battery ({battery.percent:.0f} %): slower, and the work may outlast it; it can be resumed"


def summary_lines(counts: Counts, run: RunSummary, *, seconds: float) -> dict[str, str]:
    """Label -> text for the block after a run; figures that the engine does not give are left out."""
    lines = {"rows": _rows(counts), "time": duration(seconds)}
    if run.tokens_prefilled or run.tokens_decoded:
        wall = max(run.wall_seconds, 1e-9)
        lines["prefill"] = f"{run.tokens_prefilled:,} tokens, {rate(run.tokens_prefilled / wall)} tok/s"
        lines["decode"] = f"{run.tokens_decoded:,} tokens, {rate(run.tokens_decoded / wall)} tok/s"
    if run.sweeps:
        lines["sweeps"] = f"{run.sweeps:,}"
        if run.bytes_read:
            per_sweep = size(run.bytes_read / run.sweeps)
            lines["sweeps"] += f", {per_sweep} read in each ({size(run.bytes_read)} in all)"
    if run.expert_reads:
        lines["expert reads"] = (
            f"{run.expert_reads / max(run.sweeps, 1):,.1f} a sweep, {run.unrouted_expert_reads:,} unrouted"
        )
    if run.peak_ram_bytes:
        lines["peak RAM"] = size(run.peak_ram_bytes)
        if run.ram_budget_bytes:
            lines["peak RAM"] += f" of {size(run.ram_budget_bytes)}"
    if run.vram_budget_bytes:
        lines["peak VRAM"] = f"{size(run.peak_vram_bytes)} of {size(run.vram_budget_bytes)}"
    return lines | run.extra


def summary_figures(counts: Counts, run: RunSummary, *, seconds: float) -> dict[str, object]:
    """The same for machines."""
    return {
        "total": counts.total,
        "ok": counts.ok,
        "failed": counts.failed,
        "cut_by_length": counts.cut,
        "left": counts.left,
        "seconds": round(seconds, 3),
        "run_seconds": round(run.wall_seconds, 3),
        "tokens_prefilled": run.tokens_prefilled,
        "tokens_decoded": run.tokens_decoded,
        "sweeps": run.sweeps,
        "bytes_read": run.bytes_read,
        "expert_reads": run.expert_reads,
        "unrouted_expert_reads": run.unrouted_expert_reads,
        "peak_ram_bytes": run.peak_ram_bytes,
        "ram_budget_bytes": run.ram_budget_bytes,
        "peak_vram_bytes": run.peak_vram_bytes,
        "vram_budget_bytes": run.vram_budget_bytes,
        **run.measured,
        **run.extra,
    }


def _rows(counts: Counts) -> str:
    parts = [f"{counts.ok:,} ok", f"{counts.failed:,} failed"]
    if counts.cut:
        parts.append(f"{counts.cut:,} cut by length")
    if counts.left:
        parts.append(f"{counts.left:,} left")
    return ", ".join(parts) + f" of {counts.total:,}"
