"""``batchgen-lite plan``: what a job would take, without doing it."""

from __future__ import annotations

import datetime
import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from batchgen_lite.cli.app import EXIT_CODES
from batchgen_lite.cli.generate import SAMPLING_FLAGS, template_kwargs_of
from batchgen_lite.cli.plan_report import plan_fields, plan_text
from batchgen_lite.errors import BudgetError, UsageError
from batchgen_lite.runtime.options import KV_DTYPE_NAMES, EngineOptions

if TYPE_CHECKING:
    from batchgen_lite.jobs.scan import Scan

_EPILOG = f"""\b
Examples:
  batchgen-lite plan --model ./model --input prompts.jsonl --ram 8GiB
  batchgen-lite plan --model ./model --input prompts.jsonl --hardware laptop-cpu-16g-gen3
  batchgen-lite plan --model ./model --input prompts.jsonl --expect 200 --json
\b
{EXIT_CODES[2:]}"""


@click.command(
    "plan",
    epilog=_EPILOG,
    context_settings={"auto_envvar_prefix": "BATCHGEN", "help_option_names": ["-h", "--help"]},
)
@click.option("--model", help="a directory, a .gguf file, or a Hugging Face hub id")
@click.option("--revision", help="revision of a hub id")
@click.option("--input", "source", required=True, help="JSONL file, also gz; - is standard input")
@click.option("--limit", type=click.IntRange(min=1), help="plan for the first N rows only")
@click.option("--ram", help="ceiling of the memory used, as in 8GiB  [default: what the machine can spare]")
@click.option(
    "--device",
    default="auto",
    show_default=True,
    help="auto, cpu, cuda, or cuda:N; auto takes a CUDA card where one can be used",
)
@click.option("--vram", help="ceiling of the card's memory used, as in 8GiB  [default: what the card can spare]")
@click.option("--threads", type=click.IntRange(min=1), help="compute threads  [default: one a core]")
@click.option(
    "--kv-dtype", type=click.Choice(KV_DTYPE_NAMES), default="auto", show_default=True, help="of the KV cache"
)
@click.option("--spill-dir", help="plan as if KV of rows that have to wait could go to a file here")
@click.option("--disk", help="ceiling of the spill file, as in 20GiB  [default: half of what is free there]")
@click.option("--max-tokens", type=click.IntRange(min=1), help="most tokens to generate for a row  [default: 512]")
@click.option(
    "--expect",
    type=click.FloatRange(min=0, min_open=True),
    help="tokens that a row will generate on average  [default: all it may]",
)
@click.option(
    "--on-long",
    type=click.Choice(["error", "truncate-left", "truncate-right"]),
    default="error",
    show_default=True,
    help="prompts longer than the model's context",
)
@click.option("--chat-template", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="jinja file")
@click.option("--chat-template-kwargs", help='variables for the chat template, as in {"enable_thinking": false}')
@click.option("--hardware", help="forecast for another machine: the name of a shipped profile, or a JSON file")
@click.option("--json", "as_json", is_flag=True, help="for machines")
@click.option("-v", "--verbose", count=True, help="-vv shows where errors come from")
def command(**flags: Any) -> int:
    """Say what a job would take: memory, time, what bounds it, and what would make it faster.

    The input and the model are checked as generate checks them. No weights are loaded; where the disk's rate is not
    known yet, a few hundred MB are read to measure it.
    """
    try:
        fields, text = _plan(flags)
    except BudgetError as error:
        if flags["as_json"]:
            click.echo(json.dumps({"fits": False, "smallest_ram_bytes": error.smallest, "error": str(error)}))
        raise
    click.echo(json.dumps(fields) if flags["as_json"] else text)
    return 0


def _plan(flags: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """The plan for machines and for people."""
    from batchgen_lite.model_path import resolve_model
    from batchgen_lite.offload.budget import parse_size
    from batchgen_lite.offload.devices.names import check_vram
    from batchgen_lite.offload.spill_file import spill_options
    from batchgen_lite.runtime.hardware import load_profile

    if flags["model"] is None:
        raise UsageError("--model is missing; give a directory, a .gguf file, or a hub id")
    ram = parse_size(flags["ram"], "--ram") if flags["ram"] is not None else None
    vram = parse_size(flags["vram"], "--vram") if flags["vram"] is not None else None
    check_vram(flags["device"], vram)
    spill = spill_options(flags["spill_dir"], flags["disk"], None)
    profile = load_profile(flags["hardware"]) if flags["hardware"] is not None else None
    path = resolve_model(flags["model"], revision=flags["revision"])
    scan = _scan(path, flags)

    # Only now: these import torch.
    from batchgen_lite.cli.plan_situation import describe_situation
    from batchgen_lite.runtime.job_plan import plan_job

    sizes = [scan.rows.size(row) for row in range(len(scan.rows)) if not scan.rows.bad(row)]
    if not sizes:
        raise UsageError(f"no row of {flags['source']} can be answered; generate would say why, line by line")
    options = EngineOptions(
        ram=ram, threads=flags["threads"], kv_dtype=flags["kv_dtype"], device=flags["device"], vram=vram, spill=spill
    )
    situation = describe_situation(path, sizes, options, profile, flags["expect"])
    plan = plan_job(situation)
    fields = plan_fields(situation, plan, bad_rows=scan.bad)
    return fields, plan_text(situation, plan, source=flags["source"], bad_rows=scan.bad)


def _scan(path: Path, flags: dict[str, Any]) -> Scan:
    """Check and measure every row, as generate does before it starts."""
    from batchgen_lite.jobs.prepare import Preparer, Settings
    from batchgen_lite.jobs.scan import RowReader, scan_input
    from batchgen_lite.jobs.staging import open_input
    from batchgen_lite.session import TextOptions, open_text

    today = datetime.date.today().isoformat()
    text = open_text(path, path.name, TextOptions(today, flags["chat_template"]))
    sampling = {name: flags[name] for name, _, _ in SAMPLING_FLAGS if flags.get(name) is not None}
    settings = Settings(0, sampling, template_kwargs_of(flags["chat_template_kwargs"]), flags["on_long"])
    with tempfile.TemporaryDirectory(prefix="batchgen-lite-") as folder:
        lines = open_input(flags["source"], Path(folder) / "input", resume=False)
        scan = scan_input(lines, RowReader(Preparer(settings, text)), limit=flags["limit"])
        scan.rows.close()  # sizes stay known; the lines themselves are not needed
        return scan
