"""Tiles as the Triton kernels take them: packed where a kernel decodes the format, else widened on the device first.

A tile arrives as byte ranges of a ring or of resident memory. Where they lie becomes a table of offsets, one line per
expert; tiles that are stored alike in the same memory share a table and so a launch. What no kernel decodes is widened
by the checkpoint's own torch code, a stage of rows at a time, into scratch, and the kernels read that: slower by a pass
over the widened bytes, the same otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from batchgen_lite.kernels.dequant.scratch import decoding_on
from batchgen_lite.kernels.experts.reference import stage_elements, widened
from batchgen_lite.kernels.experts.stage_memory import StageMemory
from batchgen_lite.kernels.experts.weights import ENCODINGS, SCALE_BYTES, WeightTable, host_table
from batchgen_lite.kernels.launch import upload_together
from batchgen_lite.offload.checkpoint.packed_rows import PackedRows, packed_pair, packed_rows
from batchgen_lite.offload.tiles import Tile
from batchgen_lite.offload.workspace import Workspace

Parts = Sequence[torch.Tensor]
Loaded = tuple[Tile, Parts]
Layout = tuple[list[PackedRows], ...]
"""The pieces of a tile; of a pair those of its gate and those of its up rows."""

STORED = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


@dataclass(frozen=True, slots=True)
class Tables:
    """Rows [first, first + rows) of the matrices of some experts, for one launch. ``halves``: a table, or of pairs that
    of the gates and that of the ups; ``experts``: which of them, and ``chosen`` the same as int32 on the device."""

    first: int
    halves: tuple[WeightTable, ...]
    experts: tuple[int, ...]
    chosen: torch.Tensor


class TileTables:
    """Makes tables of tiles for one model. ``dtype``: of the activations, to which formats without a kernel are
    widened; ``widened``: the names of those formats."""

    def __init__(self, tiles: Sequence[Tile], workspace: Workspace, device: torch.device, dtype: torch.dtype) -> None:
        self._workspace, self._device, self._dtype = workspace, device, dtype
        self._layouts = {id(tile): layout_of(tile) for tile in tiles}
        self._likeness = {key: None if layout is None else _likeness(layout) for key, layout in self._layouts.items()}
        self.widened = sorted({tile.matrix.encoding for tile in tiles if self._layouts[id(tile)] is None})
        # A file may also place what would have a kernel at odd bytes: there is scratch for every matrix.
        self._elements = max(stage_elements(tile.matrix) for tile in tiles)
        self._wide, self._stage = StageMemory(torch.empty(0)), torch.empty(0)
        self._storages: dict[int, torch.Tensor] = {}

    def begin(self) -> None:
        """Take the scratch from the workspace, which has just been rewound."""
        self._storages.clear()
        self._wide = StageMemory(self._workspace.take(self._elements, dtype=torch.float32))
        if self._dtype != torch.float32:
            self._stage = self._workspace.take(self._elements, dtype=self._dtype)

    def single(self, tile: Tile, parts: Parts) -> Iterator[Tables]:
        """A tile of a matrix that stands alone: tables of one line."""
        return self._tables([(tile, parts)], None)

    def grouped(self, group: Sequence[Loaded], experts: int) -> Iterator[Tables]:
        """Tiles of one role of different experts out of ``experts``."""
        return self._tables(group, experts)

    def _tables(self, group: Sequence[Loaded], experts: int | None) -> Iterator[Tables]:
        bundles: dict[object, list[Loaded]] = {}
        for tile, parts in group:
            bundles.setdefault(self._key(tile, parts), []).append((tile, parts))
        for key, bundle in bundles.items():
            if isinstance(key, int):
                yield from self._widened(*bundle[0], experts)
            else:
                yield from self._packed(bundle, experts)

    def _key(self, tile: Tile, parts: Parts) -> object:
        """Equal for tiles that may share a launch; the tile's own number where it has to be widened."""
        layout = self._layouts[id(tile)]
        if layout is None or not all(_aligned(piece, parts) for half in layout for piece in half):
            return id(tile)
        storages = {part.untyped_storage().data_ptr() for part in parts}
        assert len(storages) == 1, "a tile's parts lie in one arena"
        return (tile.start, tile.stop, storages.pop(), self._likeness[id(tile)])

    def _packed(self, bundle: Sequence[Loaded], experts: int | None) -> Iterator[Tables]:
        layouts = [self._layouts[id(tile)] or () for tile, _ in bundle]
        numbers = tuple(0 if experts is None else tile.expert for tile, _ in bundle)
        for piece in range(len(layouts[0][0])):
            halves = [
                self._host_table(
                    [(layout[half][piece], parts) for layout, (_, parts) in zip(layouts, bundle, strict=True)],
                    numbers,
                    experts or 1,
                )
                for half in range(len(layouts[0]))
            ]
            yield self._uploaded(bundle[0][0].start + layouts[0][0][piece].first, halves, numbers)

    def _host_table(
        self, rows: Sequence[tuple[PackedRows, Parts]], numbers: Sequence[int], experts: int
    ) -> WeightTable:
        places: dict[int, list[int]] = {}
        for number, (piece, parts) in zip(numbers, rows, strict=True):
            place = places[number] = [offset_of(parts[piece.data[0]]) + piece.data[1]]
            if piece.scale is not None:
                place.append(offset_of(parts[piece.scale[0]]) + piece.scale[1])
        piece, parts = rows[0]
        return host_table(
            self._storage(parts[0]), piece.encoding, piece.rows, piece.cols, experts, places,
            scales=piece.scales, row_stride=piece.row_stride, scale_row_stride=piece.scale_stride,
        )  # fmt: skip

    def _storage(self, part: torch.Tensor) -> torch.Tensor:
        """``whole_storage``, remembered for the sweep: there are a few rings and arenas, and very many tiles."""
        address = part.untyped_storage().data_ptr()
        if address not in self._storages:
            self._storages[address] = whole_storage(part)
        return self._storages[address]

    def _widened(self, tile: Tile, parts: Parts, experts: int | None) -> Iterator[Tables]:
        number = 0 if experts is None else tile.expert
        for start, stop, wide in self.stages(tile, parts):
            rows = stop - start
            name, memory = STORED[wide.dtype], self._storage(wide)
            halves = [
                host_table(
                    memory, name, rows, tile.matrix.cols, experts or 1, {number: [offset_of(wide[half * rows :])]}
                )
                for half in range(tile.matrix.outputs_per_row)
            ]
            yield self._uploaded(start, halves, (number,))

    def stages(self, tile: Tile, parts: Parts) -> Iterator[tuple[int, int, torch.Tensor]]:
        """(first row, end row, weights in the activations' dtype [rows * outputs_per_row, cols]), a stage at a time,
        each valid until the next."""
        with decoding_on(self._device):
            for start, stop, wide in widened(tile.matrix, parts, (tile.start, tile.stop), self._wide):
                if self._dtype != torch.float32:
                    wide = self._stage[: wide.numel()].view(wide.shape).copy_(wide)
                yield start, stop, wide

    def _uploaded(self, first: int, halves: Sequence[WeightTable], numbers: tuple[int, ...]) -> Tables:
        chosen = torch.from_numpy(np.array(numbers, dtype=np.int32))
        *tables, there = upload_together([*(half.table for half in halves), chosen], self._device)
        placed = tuple(half.with_table(table) for half, table in zip(halves, tables, strict=True))
        return Tables(first, placed, numbers, there)


def layout_of(tile: Tile) -> Layout | None:
    """Where kernels find a tile's rows in its parts; None where it has to be widened."""
    span = (tile.start, tile.stop)
    if tile.matrix.outputs_per_row == 2:
        return packed_pair(tile.matrix, span)
    pieces = packed_rows(tile.matrix, span)
    return None if pieces is None else (pieces,)


def _likeness(layout: Layout) -> object:
    """Equal for tiles that one launch can read: everything but the places."""
    return tuple(replace(piece, data=(0, 0), scale=None) for half in layout for piece in half)


def whole_storage(tensor: torch.Tensor) -> torch.Tensor:
    """Every byte of the memory that ``tensor`` is cut from: uint8 [nbytes]."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def offset_of(tensor: torch.Tensor) -> int:
    """The byte of ``whole_storage`` at which ``tensor`` begins."""
    return int(tensor.storage_offset()) * tensor.itemsize


def _aligned(piece: PackedRows, parts: Parts) -> bool:
    """Whether a kernel may load values where these rows lie."""
    data = offset_of(parts[piece.data[0]]) + piece.data[1]
    if data % ENCODINGS[piece.encoding].alignment:
        return False
    if piece.scale is None:
        return True
    scale = offset_of(parts[piece.scale[0]]) + piece.scale[1]
    return scale % SCALE_BYTES[piece.scales.kind] == 0
