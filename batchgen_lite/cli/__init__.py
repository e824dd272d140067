"""The command line: click commands and rich progress; nothing else imports them."""

from batchgen_lite.cli.app import main

__all__ = ["main"]
