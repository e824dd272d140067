"""The ``batchgen-lite`` command: its subcommands, and errors turned into messages and exit codes."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import traceback
from importlib import import_module
from typing import Any, NoReturn

import click

from batchgen_lite import __version__
from batchgen_lite.errors import BatchGenError

COMMANDS = {
    "generate": ("batchgen_lite.cli.generate", "Answer every line of a JSONL file."),
    "plan": ("batchgen_lite.cli.plan", "Say what a job would take, without doing it."),
    "status": ("batchgen_lite.cli.status", "Show how far a job is, from any terminal."),
    "pack": ("batchgen_lite.cli.pack", "Store a model's experts in fewer bits, as a model of its own."),
    "doctor": ("batchgen_lite.cli.doctor", "Say what this machine offers and what stands in the way."),
}
"""Subcommand -> module (with a click command ``command``) and help. Imported when called: ``--help`` stays fast."""

_DISK_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS}

EXIT_CODES = """\b
Exit codes:
  0    every row is answered
  1    done, but some rows failed: see their "error"
  2    wrong use, or the output exists
  3    the model cannot be loaded
  4    it does not fit into the memory allowed
  5    reading or writing failed (disk full, ...); finished work is saved
  70   a bug
  130  interrupted (Ctrl-C) or out of --max-time; finished work is saved
  143  the same by SIGTERM or SIGHUP
"""


class LazyGroup(click.Group):
    """Knows its subcommands by name and imports only the one that is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command = import_module(COMMANDS[cmd_name][0]).command
        return command if isinstance(command, click.Command) else None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])


@click.command(cls=LazyGroup, epilog=EXIT_CODES, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="batchgen-lite")
def group() -> None:
    """Batch inference for language models larger than memory.

    \b
    Examples:
      batchgen-lite generate --model ./Qwen3-30B-A3B --input prompts.jsonl --output answers.jsonl
      batchgen-lite generate --model model.gguf --input prompts.jsonl --limit 20 --ram 8GiB
      batchgen-lite status answers.jsonl
    """


def main(args: list[str] | None = None) -> NoReturn:
    """Run the command and exit. No traceback reaches the user, except with -vv."""
    arguments = sys.argv[1:] if args is None else args
    sys.exit(run(arguments))


def run(arguments: list[str]) -> int:
    """Run the command; returns its exit code."""
    try:
        result: Any = group.main(args=arguments, prog_name="batchgen-lite", standalone_mode=False)
        return result if isinstance(result, int) else 0
    except click.exceptions.Abort:
        return _report("interrupted", 130)
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except BatchGenError as error:
        _trace(arguments)
        return _report(str(error), error.exit_code)
    except KeyboardInterrupt:
        return _report("interrupted", 130)
    except BrokenPipeError:
        # Whoever read standard output has gone; Python would complain once more while exiting.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _report("standard output was closed before the end", 5)
    except MemoryError:
        _trace(arguments)
        return _report("out of memory; allow less with --ram, or free some", 4)
    except Exception as error:
        _trace(arguments)
        if isinstance(error, OSError) and error.errno in _DISK_ERRORS:
            return _report(f"{error}; finished work is saved: fix it and run with --resume", 5)
        return _report(f"a bug: {type(error).__name__}: {error}; -vv shows where. Finished work is saved.", 70)


def _report(message: str, code: int) -> int:
    """Standard error may be closed or full as well: the exit code must come through all the same."""
    with contextlib.suppress(OSError):
        click.echo(f"Error: {message}", err=True)
    return code


def _trace(arguments: list[str]) -> None:
    """Read from the arguments themselves: the error may have come before click had parsed them."""
    asked = arguments.count("-v") + arguments.count("--verbose") + 2 * arguments.count("-vv")
    from_environment = os.environ.get("BATCHGEN_VERBOSE", "")
    if max(asked, int(from_environment) if from_environment.isdigit() else 0) >= 2:
        traceback.print_exc()
