"""One call from a path to a model's description: spec, weights by role, checkpoint index, generation defaults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from batchgen_lite.models.assemble import weights_for
from batchgen_lite.models.generation_config import read_generation_config
from batchgen_lite.models.spec import ModelSpec
from batchgen_lite.models.spec_from_config import spec_from_config
from batchgen_lite.models.spec_from_gguf import spec_from_gguf
from batchgen_lite.models.weights import ModelWeights
from batchgen_lite.offload.checkpoint.open import open_checkpoint
from batchgen_lite.offload.checkpoint.tensors import Checkpoint

_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model on disk, described; no weight has been read. ``generation_config``: the parsed file, {} without one."""

    spec: ModelSpec
    weights: ModelWeights
    checkpoint: Checkpoint
    generation_config: Mapping[str, Any]


def load_model(path: str | Path) -> LoadedModel:
    """Describe the model at ``path``, a checkpoint directory or a GGUF file.

    Raises CheckpointError (damaged, incomplete, or weights that do not belong to the configuration) or
    UnsupportedError (something that is not implemented, by name).
    """
    checkpoint = open_checkpoint(Path(path))
    if checkpoint.format == "gguf":
        spec = spec_from_gguf(checkpoint)
        return LoadedModel(spec, weights_for(spec, checkpoint), checkpoint, {})
    generation_config = read_generation_config(checkpoint.root)
    spec = spec_from_config(checkpoint.config, generation_config, stored_dtype=_stored_dtype(checkpoint))
    return LoadedModel(spec, weights_for(spec, checkpoint), checkpoint, generation_config)


def _stored_dtype(checkpoint: Checkpoint) -> str | None:
    """The dtype of most tensors, as transformers takes it where config.json states none."""
    encodings = [info.encoding for info in checkpoint.tensors.values() if info.encoding in _DTYPES]
    return _DTYPES[max(sorted(set(encodings)), key=encodings.count)] if encodings else None
