"""``batchgen-lite status OUT``: how far a job is."""

from __future__ import annotations

import json
from typing import Any

import click

from batchgen_lite.cli.snapshot import duration, rate, size
from batchgen_lite.jobs.status import JobStatus, read_status_of


@click.command("status", context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("output")
@click.option("--json", "as_json", is_flag=True, help="one JSON object on standard output")
def command(output: str, as_json: bool) -> int:
    """Show how far the job that writes OUTPUT is: running, interrupted or complete. Disturbs nothing."""
    status = read_status_of(output)
    if as_json:
        click.echo(json.dumps(status.fields()))
        return 0
    for label, text in _lines(status).items():
        click.echo(f"{label:<10} {text}")
    return 0


def _lines(status: JobStatus) -> dict[str, str]:
    lines = {"state": status.state}
    if status.state == "interrupted":
        lines["state"] += "; --resume goes on"
    if status.state == "running":
        lines["state"] += f", process {status.pid} on {status.host}"
    share = f" ({100 * status.done / status.total:.1f} %)" if status.total else ""
    lines["rows"] = (
        f"{status.done:,} of {status.total:,} done{share}, {status.failed:,} failed, {status.cut:,} cut by length"
    )
    if status.live_rows:
        lines["unfinished"] = f"{status.live_rows:,} rows with {status.live_tokens:,} tokens journalled"
    progress: dict[str, Any] = status.progress
    if progress.get("tokens_per_second"):
        lines["speed"] = f"{rate(progress['tokens_per_second'])} tok/s"
        if progress.get("read_bytes_per_second"):
            lines["speed"] += f", {size(progress['read_bytes_per_second'])}/s"
    if progress.get("eta_seconds") is not None:
        lines["ETA"] = duration(progress["eta_seconds"])
    return lines | {"model": status.model, "input": status.input_name}
