"""GGUF metadata to a ModelSpec."""

from batchgen_lite.errors import UnsupportedError
from batchgen_lite.models.spec import ModelSpec
from batchgen_lite.offload.checkpoint.tensors import Checkpoint


def spec_from_gguf(checkpoint: Checkpoint) -> ModelSpec:
    raise UnsupportedError("GGUF")
