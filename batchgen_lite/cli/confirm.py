"""Asking the user before something large happens."""

from __future__ import annotations

import sys

import click


def ask_to_fetch(summary: str) -> bool:
    """Whether the user, asked on the terminal, wants the model fetched; False where nobody can be asked."""
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        return False
    return click.confirm(f"{summary}. Fetch it?", err=True)
