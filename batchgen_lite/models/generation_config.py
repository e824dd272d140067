"""generation_config.json: sampling defaults and stop tokens that a model's authors recommend."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from batchgen_lite.errors import CheckpointError

_SIZE_LIMIT = 1 << 20  # bytes; real files are under 1 KiB


def read_generation_config(root: Path) -> Mapping[str, Any]:
    """The parsed file in the checkpoint directory ``root``, {} where there is none."""
    path = root / "generation_config.json"
    if not path.is_file():
        return {}
    size = path.stat().st_size
    if size > _SIZE_LIMIT:
        raise CheckpointError(f"{path} has {size} bytes; at most {_SIZE_LIMIT} are read. Remove or repair it.")
    try:
        parsed = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON ({error}). Remove or repair it.") from error
    if not isinstance(parsed, dict):
        raise CheckpointError(f"{path} holds {type(parsed).__name__}, but must hold an object. Remove or repair it.")
    return parsed
