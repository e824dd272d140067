"""A weight stream over made-up matrices, and a reader whose bytes say which matrix they belong to."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from batchgen_lite.offload.arena import Arena
from batchgen_lite.offload.checkpoint.tensors import Extent
from batchgen_lite.offload.readers.protocol import ReaderStatistics, ReadPiece
from batchgen_lite.offload.ring import Ring
from batchgen_lite.offload.stream import WeightStream
from batchgen_lite.offload.tiles import SHARED_EXPERT, Module, Tile

STRIDE = 1 << 24  # file offsets between matrices: nobody's neighbours merge


class FakeMatrix:
    """Rows of one byte each; every byte of it is ``number % 251``."""

    cols = 1
    row_step = decode_step = 1
    encoding = "U8"

    def __init__(self, number: int, rows: int, outputs_per_row: int = 1) -> None:
        self.number, self.rows, self.outputs_per_row = number, rows, outputs_per_row

    def extents(self, start: int, stop: int) -> tuple[Extent, ...]:
        return (Extent(0, self.number * STRIDE + start + 17, stop - start),)

    def decode(
        self, parts: Sequence[torch.Tensor], span: tuple[int, int], rows: tuple[int, int], out: torch.Tensor
    ) -> None:
        out.copy_(parts[0][rows[0] - span[0] : rows[1] - span[0], None])

    def view(self, parts: Sequence[torch.Tensor], span: tuple[int, int]) -> torch.Tensor | None:
        return None


class HeldReader:
    """Writes each matrix' number into its pieces. ``hold`` keeps reads unfinished until ``release_all``; ``slow``
    finishes them on another thread; ``fail`` is the error that reads end with."""

    name = "held"
    alignment = 4096

    def __init__(self) -> None:
        self.reads: list[int] = []
        self.pieces_read = 0
        self.hold = self.slow = False
        self.fail: BaseException | None = None
        self._held: list[Callable[[], None]] = []
        self._pool = ThreadPoolExecutor(1)
        self._lock = threading.Lock()

    def submit(self, pieces: Sequence[ReadPiece], done: Callable[[BaseException | None], None]) -> None:
        def read() -> None:
            for piece in pieces:
                number = piece.offset // STRIDE
                piece.arena[piece.position : piece.position + piece.nbytes] = bytes([number % 251]) * piece.nbytes
            done(self.fail)

        with self._lock:
            self.reads += [piece.offset // STRIDE for piece in pieces]
            self.pieces_read += len(pieces)
        if self.hold:
            self._held.append(read)
        elif self.slow:
            self._pool.submit(read)
        else:
            read()

    def release_all(self) -> None:
        self.hold = False
        for read in self._held:
            read()
        self._held.clear()

    def statistics(self) -> ReaderStatistics:
        return ReaderStatistics()

    def close(self) -> None:
        self._pool.shutdown(wait=True)


def layer_modules(layers: int, experts: int, expert_rows: int = 3000) -> tuple[Module, ...]:
    """Per layer a linear module and a module of routed experts, each expert a gate_up and a down tile."""
    modules: list[Module] = []
    number = 0

    def tile(role: str, expert: int, rows: int) -> Tile:
        nonlocal number
        matrix = FakeMatrix(number, rows, 2 if role == "gate_up" else 1)
        number += 1
        return Tile(len(modules), role, matrix, 0, rows, expert, matrix.extents(0, rows))

    for layer in range(layers):
        linear = (tile("linear", SHARED_EXPERT, 5000), tile("linear", SHARED_EXPERT, 100))
        modules.append(Module(len(modules), "qkv", layer, linear, False, sum(t.nbytes for t in linear)))
        routed = tuple(tile(role, expert, expert_rows) for expert in range(experts) for role in ("gate_up", "down"))
        modules.append(Module(len(modules), "experts", layer, routed, True, sum(t.nbytes for t in routed)))
    return tuple(modules)


def make_stream(
    modules: Sequence[Module], ring_bytes: int | None, resident: Sequence[Tile] = ()
) -> tuple[WeightStream, HeldReader]:
    reader = HeldReader()
    ring = None if ring_bytes is None else Ring(Arena(ring_bytes), reader.alignment)
    return WeightStream(modules, reader, ring, resident), reader
