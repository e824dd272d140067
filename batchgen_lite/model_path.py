"""From what the user calls a model to a path on this machine: a directory, a GGUF file, or a Hugging Face hub id."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from batchgen_lite.errors import ModelError

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_PATTERNS = ["*.json", "*.safetensors", "*.jinja", "*.model"]


def resolve_model(
    model: str,
    *,
    revision: str | None = None,
    download: bool = False,
    note: Callable[[str], object] = lambda text: None,
) -> Path:
    """An existing path first, then the hub's cache, then, if ``download``, the hub. HF_HOME, HF_HUB_CACHE, HF_TOKEN and
    HF_HUB_OFFLINE are honoured. ``note`` is told the size before anything is fetched.

    ModelError if there is no such model, or it is not on this machine and may not be fetched."""
    path = Path(model).expanduser()
    if path.exists():
        return path
    if not _HUB_ID.fullmatch(model) or model.startswith((".", "/")):
        raise ModelError(f"no such model: {model}; give a directory, a .gguf file, or a hub id like Qwen/Qwen3-30B-A3B")
    return _from_hub(model, revision, download, note)


def _from_hub(model: str, revision: str | None, download: bool, note: Callable[[str], object]) -> Path:
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    options: dict[str, Any] = {"repo_id": model, "revision": revision, "allow_patterns": _PATTERNS}
    try:
        return Path(huggingface_hub.snapshot_download(**options, local_files_only=True))
    except LocalEntryNotFoundError:
        pass
    if not download:
        where = f" --revision {revision}" if revision else ""
        raise ModelError(
            f"{model} is neither a path nor in the hub's cache; fetch it with --download, or beforehand with: "
            f"hf download {model}{where}"
        )
    try:
        info = huggingface_hub.HfApi().model_info(model, revision=revision, files_metadata=True)
        wanted = [f.size or 0 for f in info.siblings or [] if f.rfilename.endswith((".json", ".safetensors", ".jinja"))]
        note(f"fetching {model}: {sum(wanted) / 2**30:.1f} GiB in {len(wanted)} files")
        return Path(huggingface_hub.snapshot_download(**options))
    except Exception as error:  # network, authorisation, disk: all end here, and the library's words say which
        raise ModelError(f"cannot fetch {model} from the hub: {error}") from error
