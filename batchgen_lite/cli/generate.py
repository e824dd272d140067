"""``batchgen-lite generate``: the flags. What they lead to is in ``run_job``."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from batchgen_lite.cli.app import EXIT_CODES
from batchgen_lite.cli.display import KINDS
from batchgen_lite.errors import UsageError
from batchgen_lite.runtime.options import KV_DTYPE_NAMES

SAMPLING_FLAGS = (
    ("max_tokens", int, "most tokens to generate for a row  [default: 512]"),
    ("min_tokens", int, "no row ends by itself before so many"),
    ("temperature", float, "0 takes the best token every time  [default: the model's, else 1]"),
    ("top_p", float, "keep the likeliest tokens of this total probability"),
    ("top_k", int, "keep the k likeliest tokens; 0 keeps all"),
    ("min_p", float, "keep tokens at least this likely, relative to the best"),
    ("presence_penalty", float, "lower the chance of tokens generated before"),
    ("frequency_penalty", float, "the same, for each time"),
    ("repetition_penalty", float, "the same as a factor, prompt included"),
    ("logprobs", int, "report log probabilities, and so many alternatives"),
)

_EPILOG = f"""\b
Lines of INPUT, mixed freely:
  {{"prompt": "..."}}   or "text", "messages", "token_ids"; with "custom_id" or
  "id", sampling parameters of its own, and columns that come back unchanged
  {{"custom_id": "...", "method": "POST", "url": "/v1/chat/completions", "body": {{...}}}}
\b
Sampling parameters: line over flag over the model's generation_config.json
over built-in. Every flag can be set as BATCHGEN_<FLAG>, as in BATCHGEN_RAM=8GiB.
\b
Examples:
  batchgen-lite generate --model ./model --input prompts.jsonl --limit 20
  batchgen-lite generate --model ./model --input prompts.jsonl --resume
  zcat prompts.jsonl.gz | batchgen-lite generate --model ./model --input - --output - > answers.jsonl
\b
{EXIT_CODES[2:]}"""


def _sampling_flags(function: Callable[..., Any]) -> Callable[..., Any]:
    for name, kind, text in reversed(SAMPLING_FLAGS):
        function = click.option(f"--{name.replace('_', '-')}", name, type=kind, help=text)(function)
    return function


@click.command(
    "generate",
    epilog=_EPILOG,
    context_settings={"auto_envvar_prefix": "BATCHGEN", "help_option_names": ["-h", "--help"]},
)
@click.option("--model", help="a directory, a .gguf file, or a Hugging Face hub id")
@click.option("--revision", help="revision of a hub id")
@click.option("--download", is_flag=True, help="fetch a hub id that is not on this machine")
@click.option("--input", required=True, help="JSONL file, also gz; - is standard input")
@click.option("--output", help="where answers go, - is standard output  [default: INPUT with .out.jsonl]")
@click.option("--resume", is_flag=True, help="go on with an interrupted run; starts one if there is none")
@click.option("--overwrite", is_flag=True, help="start again, whatever exists")
@click.option("--retry-errors", is_flag=True, help="as --resume, and failed rows are tried again")
@click.option("--limit", type=click.IntRange(min=1), help="answer the first N rows only; --resume can go on without")
@click.option("--max-time", help="stop cleanly after this time, as in 7h, 90m, 30s; --resume goes on")
@click.option("--unordered", is_flag=True, help="output in the order in which rows finish")
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
    "--kv-dtype",
    type=click.Choice(KV_DTYPE_NAMES),
    default="auto",
    show_default=True,
    help="of the KV cache; auto is the model's, int8 holds about twice the tokens and changes answers a little",
)
@click.option("--spill-dir", help="let KV of rows that have to wait go to a file here, where that saves time")
@click.option("--disk", help="ceiling of the spill file, as in 20GiB  [default: half of what is free there]")
@click.option("--spill-write-limit", help="most that is ever written to it, against wear, as in 200GiB")
@click.option("--seed", type=int, help="base seed of the job  [default: drawn, and kept for --resume]")
@_sampling_flags
@click.option("--stop", multiple=True, help="text that ends a row; may be given several times")
@click.option("--stop-token-id", type=int, multiple=True, help="token id that ends a row")
@click.option("--ignore-eos", is_flag=True, help="go on behind the model's end mark")
@click.option(
    "--on-long",
    type=click.Choice(["error", "truncate-left", "truncate-right"]),
    default="error",
    show_default=True,
    help="prompts longer than the model's context",
)
@click.option("--chat-template", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="jinja file")
@click.option("--chat-template-kwargs", help='variables for the chat template, as in {"enable_thinking": false}')
@click.option(
    "--reasoning",
    type=click.Choice(["keep", "split", "drop"]),
    default="keep",
    show_default=True,
    help="reasoning in the text, in a field of its own, or left out",
)
@click.option("--date", help="the day that chat templates and records tell  [default: today]")
@click.option("--progress", type=click.Choice(KINDS), default="auto", show_default=True, help="on standard error")
@click.option("--trace", help="write what happened when, for ui.perfetto.dev (.json or .json.gz)")
@click.option("--report", help="write one page of plots: where time, bytes and memory went (.html)")
@click.option("-v", "--verbose", count=True, help="more on what happens; -vv shows where errors come from")
@click.option("--engine", hidden=True)
def command(**flags: Any) -> int:
    """Answer every row of INPUT with a model that may be larger than memory.

    Answers are durable at once: an interrupted run, however it ended, goes on with --resume and ends with the same
    bytes. A row that cannot be answered becomes an error record; the others go on.
    """
    from batchgen_lite.cli.run_job import run_job

    return run_job(flags)


def sampling_of(flags: dict[str, Any]) -> dict[str, Any]:
    """The sampling parameters among the flags that were given."""
    given = {name: flags[name] for name, _, _ in SAMPLING_FLAGS if flags[name] is not None}
    if flags["stop"]:
        given["stop"] = list(flags["stop"])
    if flags["stop_token_id"]:
        given["stop_token_ids"] = list(flags["stop_token_id"])
    return given | ({"ignore_eos": True} if flags["ignore_eos"] else {})


def template_kwargs_of(text: str | None) -> dict[str, Any]:
    """--chat-template-kwargs. UsageError if it is no JSON object."""
    if text is None:
        return {}
    try:
        value = json.loads(text)
    except ValueError as error:
        raise UsageError(f"--chat-template-kwargs is not JSON ({error}); write it like '{{\"name\": true}}'") from None
    if not isinstance(value, dict):
        raise UsageError("--chat-template-kwargs must be a JSON object, like '{\"name\": true}'")
    return value


def seconds_of(text: str | None) -> float | None:
    """--max-time: "7h", "1h30m", "90", ... in seconds. UsageError if it is none."""
    if text is None:
        return None
    match = re.fullmatch(r"(?:(\d+(?:\.\d+)?)h)?(?:(\d+(?:\.\d+)?)m)?(?:(\d+(?:\.\d+)?)s?)?", text.strip().lower())
    seconds = 0.0
    if match is not None:
        seconds = sum(float(part or 0) * unit for part, unit in zip(match.groups(), (3600, 60, 1), strict=True))
    if seconds <= 0:
        raise UsageError(f"--max-time is {text!r}: it must be a time above zero, like 7h, 1h30m, 90m or 30s")
    return seconds


def default_output(source: str) -> str:
    """``prompts.jsonl`` or ``prompts.jsonl.gz`` gives ``prompts.out.jsonl``; standard input gives standard output."""
    if source == "-":
        return "-"
    path = Path(source)
    name = path.name.removesuffix(".gz")
    stem = name.removesuffix(".jsonl").removesuffix(".json")
    return str(path.with_name(f"{stem}.out.jsonl"))
