"""Sizes as people write them: 1536MiB, 400MB, 2GiB, 1000."""

from __future__ import annotations

import argparse
import re

UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def parse_size(text: str) -> int:
    """Bytes; a wrong text is an argparse error."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2].upper() not in UNITS:
        raise argparse.ArgumentTypeError(f'"{text}" is no size; write for example 1536MiB, 400MB or 2GiB')
    return int(float(match[1]) * UNITS[match[2].upper()])
