"""Pure parts of reading: where extents lie in an arena, what merges, and how runs are cut."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from batchgen_lite.offload.checkpoint.tensors import Extent
from batchgen_lite.offload.readers.blocks import merge, split
from batchgen_lite.offload.readers.placement import place
from batchgen_lite.offload.readers.protocol import ReadPiece

extents = st.lists(
    st.builds(Extent, st.integers(0, 2), st.integers(0, 40_000), st.integers(1, 9_000)), min_size=1, max_size=8
)


@given(extents, st.integers(0, 3))
def test_placed_extents_are_congruent_and_their_over_reads_overlap_nothing(extents: list[Extent], blocks: int) -> None:
    alignment, start = 512, blocks * 512
    placement = place(extents, start, alignment)
    assert placement.end % alignment == 0
    owner: dict[int, tuple[int, int]] = {}
    for extent, position in zip(extents, placement.positions, strict=True):
        assert position % alignment == extent.offset % alignment
        first = position - extent.offset % alignment
        last = -(-(position + extent.nbytes) // alignment) * alignment
        assert start <= first
        assert last <= placement.end
        for block in range(first // alignment, last // alignment):
            source = (extent.file, extent.offset - position + block * alignment)
            assert owner.setdefault(block, source) == source, "two extents would write different bytes to one block"


def test_neighbours_in_the_file_stay_neighbours_in_memory() -> None:
    placement = place([Extent(0, 100, 50), Extent(0, 150, 10), Extent(1, 160, 10), Extent(1, 400, 10)], 0, 4096)
    assert placement.positions == (100, 150, 4096 + 160, 8192 + 400)
    assert placement.end == 12288


def test_only_pieces_that_continue_in_file_and_memory_merge() -> None:
    arena, other = memoryview(bytearray(100)), memoryview(bytearray(100))
    pieces = [
        ReadPiece(0, 10, 5, arena, 0),
        ReadPiece(0, 15, 5, arena, 5),  # continues
        ReadPiece(0, 20, 0, arena, 10),  # empty: vanishes, does not interrupt
        ReadPiece(0, 20, 5, arena, 10),  # continues
        ReadPiece(0, 25, 5, arena, 16),  # a gap in memory
        ReadPiece(0, 31, 5, arena, 21),  # a gap in the file
        ReadPiece(1, 36, 5, arena, 26),  # another file
        ReadPiece(1, 41, 5, other, 31),  # another arena
    ]
    runs = [(run.file, run.offset, run.nbytes, run.position) for run in merge(pieces)]
    assert runs == [(0, 10, 15, 0), (0, 25, 5, 16), (0, 31, 5, 21), (1, 36, 5, 26), (1, 41, 5, 31)]
    assert pieces[0].nbytes == 5


@given(st.integers(0, 30_000), st.integers(1, 100_000), st.integers(1, 20))
def test_blocks_cover_a_run_once_and_cut_at_aligned_offsets(offset: int, nbytes: int, blocks: int) -> None:
    alignment = 512
    cuts = list(split(offset, nbytes, blocks * alignment, alignment))
    position = offset
    for start, length in cuts:
        assert start == position
        assert length > 0
        assert start % alignment + length <= blocks * alignment
        assert start == offset or start % alignment == 0
        position += length
    assert position == offset + nbytes
    # Nearly equal: the threads that share a run finish together.
    if len(cuts) > 1:
        assert len(cuts) <= -(-(nbytes + alignment) // (blocks * alignment)) + 1
