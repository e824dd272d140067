"""Models from the Hugging Face hub: found in its cache, or fetched into it once the user has agreed to the size.

Nothing here decides where the cache is or who asks: HF_HOME, HF_HUB_CACHE, HF_TOKEN, HF_ENDPOINT and HF_HUB_OFFLINE
are huggingface_hub's, and it reads them. A cached model is used without a single request, also from a cache that may
only be read. Of a repository only what a run needs is fetched: many hold the same weights two or three times.
"""

from __future__ import annotations

import fnmatch
import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from batchgen_lite.errors import ModelError, StorageError
from batchgen_lite.offload.budget import format_size

CONFIGURATION = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
)
_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_SHARDS = "model-*-of-*.safetensors"
_SPLIT = re.compile(r"(.+)-\d{5}-of-(\d{5})\.gguf")
_SPARE_DISK = 256 << 20  # left free beside the download

Confirm = Callable[[str], bool]


@dataclass(frozen=True, slots=True)
class HubModel:
    """``repository``: "org/name"; ``file``: a GGUF file in it, None for a directory of safetensors files;
    ``revision``: branch, tag or commit, None for the default branch."""

    repository: str
    file: str | None = None
    revision: str | None = None

    def __str__(self) -> str:
        name = self.repository if self.file is None else f"{self.repository}/{self.file}"
        return name if self.revision is None else f"{name}@{self.revision}"

    def files(self) -> tuple[str, ...]:
        """The GGUF file and its sibling parts."""
        if self.file is None:
            return ()
        match = _SPLIT.fullmatch(self.file)
        if match is None:
            return (self.file,)
        return tuple(f"{match[1]}-{part:05d}-of-{match[2]}.gguf" for part in range(1, int(match[2]) + 1))


_NAME = re.compile(
    r"(?P<repository>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)"
    r"(?:/(?P<file>[\w. /-]+\.gguf))?(?:@(?P<revision>[\w.][\w./-]*))?"
)


def parse_hub_name(name: str) -> HubModel | None:
    """``org/name``, ``org/name/file.gguf``, either with ``@revision``; None if ``name`` is no such thing."""
    match = _NAME.fullmatch(name)
    if match is None or ".." in name:
        return None
    return HubModel(match["repository"], match["file"], match["revision"])


def find_cached(model: HubModel) -> Path | None:
    """The model in the hub's cache, None unless all of its files are there. No request is made, nothing written."""
    first = model.files()[0] if model.file is not None else "config.json"
    path = _cached(model, first, model.revision)
    if path is None:
        return None
    if model.file is not None:
        complete = all(_cached(model, name, model.revision) for name in model.files())
        return path if complete else None
    return path.parent if _has_weights(path.parent) else None


def _cached(model: HubModel, name: str, revision: str | None) -> Path | None:
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(model.repository, name, revision=revision)
    return Path(found) if isinstance(found, str) else None


def _has_weights(root: Path) -> bool:
    if (root / _SINGLE).exists():
        return True
    try:
        weight_map = json.loads((root / _INDEX).read_bytes())["weight_map"]
        return all((root / shard).exists() for shard in set(weight_map.values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def fetch(model: HubModel, agree: Confirm) -> Path:
    """Fetch what is missing of ``model`` into the hub's cache. ``agree`` is shown the size and the room on the disk,
    and decides.

    Raises ModelError if the hub does not have it, does not let us, cannot be reached, or ``agree`` says no;
    StorageError if the disk is too small for it.
    """
    import huggingface_hub
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        raise ModelError(f"{model} is not complete in the hub's cache, and HF_HUB_OFFLINE forbids fetching it")
    with _Explained(model):
        info = huggingface_hub.HfApi().model_info(model.repository, revision=model.revision, files_metadata=True)
    sizes = {file.rfilename: file.size or 0 for file in info.siblings or []}
    wanted = choose_files(model, sizes)
    missing = sum(sizes[name] for name in wanted if _cached(model, name, info.sha) is None)
    cache = Path(constants.HF_HUB_CACHE)
    free = _free_bytes(cache)
    summary = f"{model}: {format_size(missing)} in {len(wanted)} files to fetch, {format_size(free)} free in {cache}"
    if missing + _SPARE_DISK > free:
        raise StorageError(f"{summary}: not enough; make room, or set HF_HUB_CACHE to a folder on another disk")
    if not agree(summary):
        raise ModelError(f"{summary}; add --download to fetch it")
    with _Explained(model):
        root = huggingface_hub.snapshot_download(
            model.repository, revision=model.revision, allow_patterns=[_literally(name) for name in wanted]
        )
    return Path(root) if model.file is None else Path(root) / model.files()[0]


def choose_files(model: HubModel, sizes: dict[str, int]) -> list[str]:
    """Of a repository's files those that a run needs. ModelError if it cannot run, which says what there is."""
    if model.file is not None:
        absent = [name for name in model.files() if name not in sizes]
        if absent:
            raise ModelError(f"{model.repository} has no file {absent[0]}; {_ggufs(sizes)}")
        return list(model.files())
    wanted = [name for name in CONFIGURATION if name in sizes]
    if _SINGLE in sizes:
        weights = [_SINGLE]
    elif _INDEX in sizes:
        weights = [_INDEX, *(name for name in sizes if fnmatch.fnmatchcase(name, _SHARDS) and "/" not in name)]
    elif any(name.endswith(".gguf") for name in sizes):
        raise ModelError(f"{model.repository} holds GGUF files; {_ggufs(sizes)}")
    else:
        raise ModelError(
            f"{model.repository} has neither {_SINGLE} nor {_INDEX}; only safetensors and GGUF weights are read"
        )
    if "config.json" not in wanted:
        raise ModelError(f"{model.repository} has no config.json; it is no model that can be run by itself")
    return wanted + weights


def _ggufs(sizes: dict[str, int]) -> str:
    names = sorted(name for name in sizes if name.endswith(".gguf"))
    if not names:
        return "it has no GGUF files"
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return f"name one of them, as in ORG/NAME/FILE.gguf: {', '.join(names[:8])}{more}"


def _literally(name: str) -> str:
    """``name`` as a pattern that matches nothing else."""
    return re.sub(r"([\[*?])", r"[\1]", name)


def _free_bytes(path: Path) -> int:
    """On the disk of ``path``, which need not exist yet."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return shutil.disk_usage(path).free


class _Explained:
    """Turns what huggingface_hub and its HTTP client raise into a ModelError or StorageError that says what to do."""

    def __init__(self, model: HubModel) -> None:
        self._model = model

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        if not isinstance(error, Exception) or isinstance(error, (ModelError, StorageError)):
            return
        from huggingface_hub import constants
        from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

        model, site = self._model, constants.ENDPOINT
        if isinstance(error, GatedRepoError):
            text = f"{model} is gated: accept its terms at {site}/{model.repository}, then set HF_TOKEN to your token"
        elif isinstance(error, RevisionNotFoundError):
            text = f"{model.repository} has no revision {model.revision!r}; see {site}/{model.repository}/tree/main"
        elif isinstance(error, RepositoryNotFoundError):
            text = (
                f"{model.repository} is not on {site}, or is private: check the name, and set HF_TOKEN if it is private"
            )
        elif isinstance(error, OSError) and error.errno is not None and error.filename is not None:
            raise StorageError(f"cannot write into the hub's cache: {error}") from error
        else:
            first = (str(error).strip() or type(error).__name__).splitlines()[0]
            text = f"cannot fetch {model} from {site}: {first}; what has arrived is kept: try again"
        raise ModelError(text) from error
