"""Physical lines of an input file: bytes split on ``\\n`` and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import BinaryIO

from batchgen_lite.errors import UsageError

MAX_LINE_BYTES = 256 << 20
"""Longer lines fail as rows instead of exhausting memory (a line needs about four times its size while parsed)."""

_UTF8_BOM = b"\xef\xbb\xbf"
_UTF16_BOMS = (b"\xff\xfe", b"\xfe\xff")


@dataclass(frozen=True, slots=True)
class RawLine:
    """One line that is not blank. ``number`` is the physical line number, from 1; ``offset`` the position of its
    first byte; ``data`` its bytes without BOM and line end, cut at MAX_LINE_BYTES if ``oversize``."""

    number: int
    offset: int
    data: bytes
    oversize: bool = False


def read_lines(
    stream: BinaryIO, observe: Callable[[bytes], object] | None = None, *, max_bytes: int = MAX_LINE_BYTES
) -> Iterator[RawLine]:
    """Every line of ``stream`` (positioned at its start) that is not blank.

    Only ``\\n`` separates (U+2028, NEL, form feed and a bare ``\\r`` are data); one ``\\r`` before it belongs to the
    line end; a BOM is dropped at the very start only; the last line may lack its ``\\n``. ``observe`` sees every
    byte of the stream once, in order (a hash, a counter). UsageError for UTF-16 files.
    """
    offset = 0
    number = 0
    while chunk := stream.readline(max_bytes + 1):
        number += 1
        start = offset
        oversize = False
        data = chunk
        if observe is not None:
            observe(chunk)
        offset += len(chunk)
        while not chunk.endswith(b"\n") and len(chunk) == max_bytes + 1:  # the rest of a line beyond the cap
            oversize = True
            chunk = stream.readline(max_bytes + 1)
            if observe is not None:
                observe(chunk)
            offset += len(chunk)
        if number == 1:
            if data.startswith(_UTF16_BOMS):
                raise UsageError(
                    "the input is UTF-16: it must be UTF-8; convert it with: iconv -f utf-16 -t utf-8 IN > OUT"
                )
            if data.startswith(_UTF8_BOM):
                start += len(_UTF8_BOM)
                data = data[len(_UTF8_BOM) :]
        data = _without_line_end(data[:max_bytes] if oversize else data)
        if oversize or data.strip():
            yield RawLine(number, start, data, oversize)


def _without_line_end(data: bytes) -> bytes:
    if data.endswith(b"\r\n"):
        return data[:-2]
    if data.endswith(b"\n"):
        return data[:-1]
    # A last line without "\n" may still have lost only the "\n" of its "\r\n".
    return data[:-1] if data.endswith(b"\r") else data
