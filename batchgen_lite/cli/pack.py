"""``batchgen-lite pack``: experts rounded to few bits and laid out for reading, as a model directory of its own."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from batchgen_lite.cli.snapshot import size
from batchgen_lite.errors import BudgetError, TokenizerError, UsageError

if TYPE_CHECKING:
    from batchgen_lite.pack.packing import PackReport

_BITS = {"int4": 4, "int8": 8, "keep": None}


@click.command("pack", context_settings={"auto_envvar_prefix": "BATCHGEN", "help_option_names": ["-h", "--help"]})
@click.argument("model")
@click.argument("out", type=click.Path(path_type=Path))
@click.option(
    "--experts",
    type=click.Choice(list(_BITS)),
    default="int4",
    show_default=True,
    help="how routed experts are stored; everything else stays as it is",
)
@click.option("--group", type=click.Choice(["32", "64"]), default="32", show_default=True, help="weights per scale")
@click.option(
    "--zero-points/--symmetric", default=False, help="a minimum beside each scale, or none  [default: --symmetric]"
)
@click.option("--ram", help="ceiling of the memory used, as in 2GiB  [default: what the machine can spare]")
@click.option("--threads", type=click.IntRange(min=1), help="compute threads  [default: one a core]")
@click.option(
    "--verify", is_flag=True, help="read the result again and compare checksums; of an existing OUT, only that"
)
@click.option(
    "--calibration",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="text on which quality is measured  [default: a built-in paragraph]",
)
@click.option("--no-quality", is_flag=True, help="do not run both models at the end to compare them")
@click.option("--revision", help="revision of a hub id")
@click.option("--download", is_flag=True, help="fetch a hub id that is not on this machine, without asking")
def command(model: str, out: Path, **flags: Any) -> int:
    """Write MODEL, packed, to the new directory OUT, which is a --model like any other.

    \b
    Fewer bytes per expert are fewer bytes to read in every sweep. An interrupted
    run goes on where it was: give the same command again. At the end both models
    score a text, which tells what packing costs in quality.
    """
    from batchgen_lite.cli.confirm import ask_to_fetch
    from batchgen_lite.model_path import resolve_model
    from batchgen_lite.pack.packing import PackOptions, pack_model, verify_packed

    if out.exists() and flags["verify"]:
        _note(f"{out}: {size(verify_packed(out, _note))} verified")
        return 0
    ram = None
    if flags["ram"] is not None:
        from batchgen_lite.offload.budget import parse_size

        ram = parse_size(flags["ram"], "--ram")
    source = resolve_model(
        model, revision=flags["revision"], download=flags["download"], note=_note, confirm=ask_to_fetch
    )
    _set_threads(flags["threads"])
    options = PackOptions(_BITS[flags["experts"]], int(flags["group"]), flags["zero_points"], ram)
    try:
        report = pack_model(source, out, options, _note)
    except KeyboardInterrupt:
        _note(f"finished layers are kept in {out}.partial: the same command goes on behind them")
        raise
    if flags["verify"]:
        _note(f"{size(verify_packed(out, _note))} verified")
    lines = report_lines(report)
    if not flags["no_quality"]:
        lines |= _quality_lines(source, out, flags["calibration"], ram, flags["threads"])
    width = max(map(len, lines))
    for label, text in lines.items():
        click.echo(f"{label:<{width}}  {text}")
    return 0


def report_lines(report: PackReport) -> dict[str, str]:
    """Label -> text of the bytes before and after."""
    return {
        "model": _change(report.source_bytes, report.packed_bytes),
        "routed experts": _change(report.source_expert_bytes, report.packed_expert_bytes),
    }


def _change(before: int, after: int) -> str:
    return f"{size(before)} -> {size(after)}, {before / max(after, 1):.2f} times smaller"


def _quality_lines(
    source: Path, packed: Path, calibration: Path | None, ram: int | None, threads: int | None
) -> dict[str, str]:
    """The packed model is complete by now: what stands in the way of measuring it is a line, not a failure."""
    from batchgen_lite.models.load import load_model
    from batchgen_lite.pack.quality import TEXT, measure_quality
    from batchgen_lite.runtime.options import EngineOptions

    try:
        text = TEXT if calibration is None else calibration.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--calibration {calibration} cannot be read as UTF-8 text: {error}") from error
    options = EngineOptions(ram=ram, threads=threads)
    try:
        quality = measure_quality(source, packed, text, options, load_model(source).spec.vocab_size, _note)
    except (BudgetError, TokenizerError) as error:
        return {"quality": f"not measured: {error}"}
    ratio = quality.packed_perplexity / quality.source_perplexity
    return {
        "KL divergence": f"{quality.kl:.4f} nats a token, mean of {quality.places} places",
        "perplexity": f"{quality.source_perplexity:.3f} -> {quality.packed_perplexity:.3f}, a ratio of {ratio:.4f}",
        "same best token": f"{quality.same_best:.0%}",
    }


def _set_threads(threads: int | None) -> None:
    if threads is not None:
        import torch

        torch.set_num_threads(threads)


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
