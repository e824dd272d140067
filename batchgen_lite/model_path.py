"""From what the user calls a model to a path on this machine: a directory, a GGUF file, or a Hugging Face hub id."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from batchgen_lite.errors import ModelError, UsageError


def resolve_model(
    model: str,
    *,
    revision: str | None = None,
    download: bool = False,
    note: Callable[[str], object] = lambda text: None,
    confirm: Callable[[str], bool] | None = None,
) -> Path:
    """An existing path first, then the hub's cache, then the hub: ``org/name``, or ``org/name/file.gguf``, either with
    ``@revision``. HF_HOME, HF_HUB_CACHE, HF_TOKEN and HF_HUB_OFFLINE are honoured.

    Nothing is fetched unless ``download`` is set or ``confirm``, shown size and free disk, says yes; ``note`` is told
    the size as well. Raises ModelError if there is no such model or it may not be fetched, StorageError if the disk is
    too small, UsageError for two different revisions."""
    path = Path(model).expanduser()
    if path.exists():
        return path
    from batchgen_lite import hub  # only where a hub id is given: huggingface_hub takes its time to import

    wanted = hub.parse_hub_name(model)
    if wanted is None:
        raise ModelError(f"no such model: {model}; give a directory, a .gguf file, or a hub id like Qwen/Qwen3-30B-A3B")
    if revision is not None:
        if wanted.revision not in (None, revision):
            raise UsageError(f"{model} and --revision {revision} name two revisions; give one")
        wanted = replace(wanted, revision=revision)
    cached = hub.find_cached(wanted)
    if cached is not None:
        return cached

    def agree(summary: str) -> bool:
        if download:
            note(summary)
            return True
        return confirm is not None and confirm(summary)

    return hub.fetch(wanted, agree)
