"""From pieces to reads: neighbours merge, large runs split so that several threads share them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from batchgen_lite.offload.readers.protocol import ReadPiece


@dataclass(slots=True)
class Run:
    """Bytes that are contiguous both in a file and in an arena."""

    file: int
    offset: int
    nbytes: int
    arena: memoryview
    position: int


def check_piece(piece: ReadPiece, files: int) -> None:
    """Raise ValueError for a piece of an unknown file (there are ``files``) or with no room in its arena."""
    if not 0 <= piece.file < files:
        raise ValueError(f"file number {piece.file}, but the reader has {files} files")
    if min(piece.nbytes, piece.offset, piece.position) < 0:
        raise ValueError(f"a piece with a negative number: {piece}")
    if piece.position + piece.nbytes > len(piece.arena):
        raise ValueError(f"{piece.nbytes} bytes at {piece.position} are outside an arena of {len(piece.arena)}")
    if piece.arena.readonly or piece.arena.itemsize != 1 or not piece.arena.c_contiguous:
        raise ValueError("an arena must be a writable, contiguous memoryview of bytes")


def merge(pieces: Sequence[ReadPiece]) -> list[Run]:
    """Join each piece to the one before it where file range and destination both continue. Empty pieces vanish."""
    runs: list[Run] = []
    last: Run | None = None
    for piece in pieces:
        if piece.nbytes == 0:
            continue
        if (
            last is not None
            and piece.file == last.file
            and piece.offset == last.offset + last.nbytes
            and piece.position == last.position + last.nbytes
            and piece.arena is last.arena
        ):
            last.nbytes += piece.nbytes
        else:
            last = Run(piece.file, piece.offset, piece.nbytes, piece.arena, piece.position)
            runs.append(last)
    return runs


def split(offset: int, nbytes: int, block_bytes: int, alignment: int) -> Iterator[tuple[int, int]]:
    """Cut [offset, offset + nbytes) into (offset, nbytes) blocks of nearly equal size, at most ``block_bytes`` each.

    Inner cuts are at multiples of ``alignment`` of the file, so the blocks' over-reads never touch one another.
    ``block_bytes`` is a multiple of ``alignment``.
    """
    first = offset - offset % alignment
    last = offset + nbytes
    count = -(-(last - first) // block_bytes)
    step = -(-(last - first) // (count * alignment)) * alignment
    for start in range(first, last, step):
        begin = max(start, offset)
        yield begin, min(start + step, last) - begin
