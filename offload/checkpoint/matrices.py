"""The matrices that families build their weights from."""

from batchgen_lite.offload.checkpoint.combined import ConcatMatrix, InterleavedPair, PairMatrix, SplitPair
from batchgen_lite.offload.checkpoint.dense import read_dense, read_extent
from batchgen_lite.offload.checkpoint.permuted import HeadPermutedMatrix, TransposedMatrix
from batchgen_lite.offload.checkpoint.stored import TensorMatrix, tensor_slice
from batchgen_lite.offload.checkpoint.vectors import DeinterleavedVector, HeadPermutedVector, JoinedVector

__all__ = [
    "ConcatMatrix",
    "DeinterleavedVector",
    "HeadPermutedMatrix",
    "HeadPermutedVector",
    "InterleavedPair",
    "JoinedVector",
    "PairMatrix",
    "SplitPair",
    "TensorMatrix",
    "TransposedMatrix",
    "read_dense",
    "read_extent",
    "tensor_slice",
]
