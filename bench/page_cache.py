"""Drop files from the page cache, so that a measurement reads them from the disk."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable
from pathlib import Path


def files_below(path: Path) -> list[Path]:
    return [path] if path.is_file() else sorted(entry for entry in path.rglob("*") if entry.is_file())


def drop_from_cache(paths: Iterable[Path]) -> int:
    """Write out and forget the pages of all files at or below ``paths``; returns the bytes of the files.

    Needs no privilege. Pages that a running process has mapped stay."""
    total = 0
    for path in paths:
        for file in files_below(path):
            descriptor = os.open(file, os.O_RDONLY)
            try:
                os.fdatasync(descriptor)  # dirty pages are not dropped
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                total += os.fstat(descriptor).st_size
            finally:
                os.close(descriptor)
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description="Drop files from the page cache.")
    parser.add_argument("paths", nargs="+", type=Path, help="files or folders")
    dropped = drop_from_cache(parser.parse_args().paths)
    print(f"{dropped / 1e6:.0f} MB of files are no longer cached")


if __name__ == "__main__":
    main()
