"""What a job is, written once and compared at resume: a resumed run must be the same job, or its file would mix two."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from batchgen_lite.errors import StorageError, UsageError

FORMAT = 1


@dataclass(slots=True)
class Manifest:
    """``identity`` decides the output's bytes: input hash, model, dtypes, sampling, templates, seed, date. The rest
    informs. ``rows`` counts the lines to answer under ``limit``; ``result`` is filled once the output is in place."""

    identity: dict[str, Any]
    base_seed: int
    date: str
    tool_version: str
    input_name: str
    model: str
    rows: int = 0
    limit: int | None = None
    unordered: bool = False
    complete: bool = False
    result: dict[str, int] = field(default_factory=dict)
    format: int = FORMAT

    def save(self, path: Path) -> None:
        """Write atomically and durably. StorageError if that fails."""
        text = json.dumps(asdict(self), indent=2, ensure_ascii=True) + "\n"
        replace_durably(path, text.encode())

    def differences(self, identity: dict[str, Any]) -> list[str]:
        """Lines "name: was A, is B" where ``identity`` is not this job's."""
        return _differences("", self.identity, identity)


def load_manifest(path: Path) -> Manifest | None:
    """The manifest at ``path``, or None if there is none. UsageError if it cannot be understood."""
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StorageError(f"cannot read {path}: {error.strerror}") from error
    advice = "start again with --overwrite"
    try:
        values = json.loads(text)
        if values.get("format") != FORMAT:
            raise UsageError(f"{path} has format {values.get('format')}, this version reads {FORMAT}; {advice}")
        return Manifest(**values)
    except (ValueError, TypeError, AttributeError):
        raise UsageError(f"{path} is not a manifest of this tool; {advice}, or choose another --output") from None


def refuse_another_job(path: Path, differences: list[str]) -> None:
    """UsageError naming what changed since the run that is to be resumed; nothing if nothing did."""
    if differences:
        shown = "; ".join(differences[:6])
        raise UsageError(
            f"--resume: {path.name} belongs to another job ({shown}); "
            "give the same input, model and options as before, or --overwrite"
        )


def replace_durably(path: Path, data: bytes) -> None:
    """``path`` holds ``data`` or what it held before, whatever happens."""
    fresh = path.with_name(path.name + ".tmp")
    try:
        with fresh.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(fresh, path)
        sync_directory(path.parent)
    except OSError as error:
        fresh.unlink(missing_ok=True)
        raise StorageError(f"cannot write {path}: {error.strerror}; free space there and try again") from error


def sync_directory(path: Path) -> None:
    """Make renames in ``path`` durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _differences(prefix: str, old: Any, new: Any) -> list[str]:
    if isinstance(old, dict) and isinstance(new, dict):
        lines: list[str] = []
        for name in sorted(old.keys() | new.keys()):
            lines += _differences(f"{prefix}.{name}" if prefix else name, old.get(name), new.get(name))
        return lines
    # Compared as JSON, because the old value went through it (tuples became lists).
    if json.dumps(old, sort_keys=True) == json.dumps(new, sort_keys=True):
        return []
    return [f"{prefix}: was {_short(old)}, is {_short(new)}"]


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
