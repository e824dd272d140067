"""How many bytes a row takes in each storage encoding; torch-free, so that headers are checked without torch."""

from __future__ import annotations

from batchgen_lite.errors import CheckpointError, UnsupportedError

# name -> (elements of a block, bytes of a block). Plain types are blocks of one element. Block layouts are those of
# ggml-common.h; plain names are safetensors'.
_BLOCKS: dict[str, tuple[int, int]] = {
    "F64": (1, 8),
    "F32": (1, 4),
    "F16": (1, 2),
    "BF16": (1, 2),
    "F8_E4M3": (1, 1),
    "F8_E5M2": (1, 1),
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q5_0": (32, 22),
    "Q5_1": (32, 24),
    "Q8_0": (32, 34),
    "IQ4_NL": (32, 18),
    "MXFP4": (32, 17),
    "Q2_K": (256, 84),
    "Q3_K": (256, 110),
    "Q4_K": (256, 144),
    "Q5_K": (256, 176),
    "Q6_K": (256, 210),
}

# What `pack` writes beside Q4_0, Q4_1 and Q8_0: bits, M for a minimum beside the scale, group (kernels/dequant/groups).
_GROUPS: dict[str, tuple[int, int]] = {
    "I4_G64": (64, 34),
    "I4M_G64": (64, 36),
    "I8_G64": (64, 66),
    "I8M_G32": (32, 36),
    "I8M_G64": (64, 68),
}
_BLOCKS |= _GROUPS

SUPPORTED_ENCODINGS = tuple(_BLOCKS)
GROUP_ENCODINGS = tuple(_GROUPS)
"""Those that occur in packed models only."""


def _block(encoding: str) -> tuple[int, int]:
    block = _BLOCKS.get(encoding)
    if block is None:
        raise UnsupportedError(
            f"weights stored as {encoding} cannot be widened; supported encodings: {', '.join(SUPPORTED_ENCODINGS)}. "
            "Use a checkpoint in one of these"
        )
    return block


def is_supported(encoding: str) -> bool:
    """Whether ``decode_rows`` knows the encoding."""
    return encoding in _BLOCKS


def block_size(encoding: str) -> int:
    """Elements per block; a row's length is a multiple of it. Raises UnsupportedError for an unknown encoding."""
    return _block(encoding)[0]


def block_bytes(encoding: str) -> int:
    """Bytes per block. Raises UnsupportedError for an unknown encoding."""
    return _block(encoding)[1]


def row_bytes(encoding: str, cols: int) -> int:
    """Bytes of one stored row of ``cols`` elements.

    Raises UnsupportedError for an unknown encoding and CheckpointError if ``cols`` is not a multiple of the block.
    """
    elements, nbytes = _block(encoding)
    if cols % elements:
        raise CheckpointError(f"a {encoding} row has {cols} elements, not a multiple of the block size {elements}")
    return cols // elements * nbytes
