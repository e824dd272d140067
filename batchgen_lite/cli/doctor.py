"""``batchgen-lite doctor``: what this machine offers, what stands in the way, and what to do about it."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from batchgen_lite.cli import doctor_machine as machine
from batchgen_lite.cli import doctor_storage as storage
from batchgen_lite.cli.doctor_finding import Check, Finding, run_checks
from batchgen_lite.errors import UsageError


@click.command("doctor", context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--model", type=click.Path(path_type=Path), help="also check this model, and measure the disk it lies on")
@click.option("--json", "as_json", is_flag=True, help="one JSON object on standard output")
@click.option("--quick", is_flag=True, help="measure nothing: no reads, no matrix products")
@click.option("--refresh", is_flag=True, help="measure the disk again instead of trusting the last month's figures")
def command(model: Path | None, as_json: bool, quick: bool, refresh: bool) -> int:
    """Look at processor, GPU, memory, disk, limits and versions; each problem comes with what to do about it.

    With --model about 450 MB are read from it; nothing is written but a small cache of the measured rates.
    """
    if model is not None and not model.exists():
        raise UsageError(f"--model {model} does not exist; give a directory with the weights, or a .gguf file")
    findings = examine(model, quick=quick, refresh=refresh)
    if as_json:
        shown = list(findings)
        problems = sum(finding.is_problem for finding in shown)
        click.echo(json.dumps({"problems": problems, "findings": [finding.fields() for finding in shown]}))
        return 0
    show(findings, Console(file=sys.stdout, highlight=False), model)
    return 0


def examine(model: Path | None, *, quick: bool, refresh: bool) -> Iterator[Finding]:
    """All findings, section by section, as they are made."""
    for section, checks in _checks(model, quick=quick, refresh=refresh).items():
        yield from run_checks(section, checks)


def _checks(model: Path | None, *, quick: bool, refresh: bool) -> dict[str, list[Check]]:
    from batchgen_lite.cli import doctor_compute as compute

    checks: dict[str, list[Check]] = {
        "versions": [machine.versions],
        "processor": [machine.processor],
        "memory": [machine.memory],
        "limits": [machine.limits],
        "power": [machine.power],
        "GPU": [compute.gpu],
    }
    files = storage.weight_files(model) if model is not None else []
    if model is not None:
        checks["model"] = [functools.partial(storage.model_files, model)]
    checks["disk"] = [functools.partial(storage.disk, files[0])] if files else []
    checks["disk"].append(functools.partial(storage.gpudirect, files[0] if files else None))
    if not quick:
        if files:
            checks["disk"].append(functools.partial(storage.read_rates, files))
            checks["disk"].append(functools.partial(storage.probe_choice, files, refresh=refresh))
        checks["rates"] = [compute.copies_to_gpu, compute.gemm_rates]
    return checks


def show(findings: Iterator[Finding], console: Console, model: Path | None) -> None:
    """A table that grows section by section, then the problems with their remedies."""
    problems: list[Finding] = []
    section, rows = "", _table()
    for finding in findings:
        if finding.section != section:
            if section:
                console.print(rows)
            section, rows = finding.section, _table()
            console.print(Text(f"\n{section}", style="bold"))
        mark = Text("!", style="bold yellow") if finding.is_problem else Text("ok", style="green")
        rows.add_row(mark, Text(finding.name), Text(finding.value))
        if finding.is_problem:
            problems.append(finding)
    console.print(rows)
    console.print()
    if model is None:
        console.print(Text("Give --model PATH to check a model and to measure the disk it lies on.", style="dim"))
    if not problems:
        console.print(Text("No problems found.", style="bold green"))
        return
    console.print(Text("1 problem:" if len(problems) == 1 else f"{len(problems)} problems:", style="bold yellow"))
    for problem in problems:
        console.print(Text(f"- {problem.section}, {problem.name}: {problem.value}\n    {problem.advice}"))


def _table() -> Table:
    table = Table.grid(padding=(0, 1))
    table.add_column(width=4, justify="right")
    table.add_column(min_width=18)
    table.add_column(overflow="fold")
    return table
