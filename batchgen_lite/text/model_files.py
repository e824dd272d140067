"""Small text and JSON files beside the weights: tokenizer.json, tokenizer_config.json and their like."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from batchgen_lite.errors import TokenizerError

_MAX_BYTES = 256 << 20  # tokenizer.json of the largest vocabularies is about 35 MB


def read_text_file(path: Path, limit: int = _MAX_BYTES) -> str:
    """The file's text. Raises TokenizerError when it is larger than ``limit`` bytes, unreadable or not UTF-8."""
    try:
        size = path.stat().st_size
        if size > limit:
            raise TokenizerError(f"{path.name} has {size} bytes; at most {limit} are accepted")
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TokenizerError(f"cannot read {path}: {error}") from error


def read_json_file(root: Path, name: str) -> dict[str, Any]:
    """The JSON object in ``root``/``name``; {} if there is no such file. Raises TokenizerError when it is damaged."""
    path = root / name
    if not path.is_file():
        return {}
    try:
        value = json.loads(read_text_file(path))
    except (ValueError, RecursionError) as error:
        raise TokenizerError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise TokenizerError(f"{path} must hold a JSON object, not a {type(value).__name__}")
    return value
