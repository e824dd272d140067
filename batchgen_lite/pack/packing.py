"""Packing a model: plan, check memory and disk, write file after file, give the finished directory its name."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from batchgen_lite.errors import BudgetError, CheckpointError, OutputExistsError, StorageError
from batchgen_lite.models.load import LoadedModel, load_model
from batchgen_lite.offload.budget import available_memory, default_ram_budget, format_size
from batchgen_lite.offload.budget_process import resident_bytes
from batchgen_lite.offload.checkpoint.files import shard_path, verify_unchanged
from batchgen_lite.offload.checkpoint.packed_directory import (
    PACK_FORMAT,
    PACK_INDEX,
    PACK_VERSION,
    PackedFile,
    read_pack_index,
)
from batchgen_lite.offload.malloc_tuning import tune_malloc
from batchgen_lite.pack.layout import FilePlan, expert_bytes, plan_files
from batchgen_lite.pack.progress import Progress
from batchgen_lite.pack.quantise import encoding_for
from batchgen_lite.pack.write_file import sync_directory, working_bytes, write_file

_SPARE_DISK = 64 << 20  # never fill a disk to the last byte: the index, and whoever else writes
_READ_BYTES = 8 << 20
_COMPANIONS = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
)


@dataclass(frozen=True, slots=True)
class PackOptions:
    """``bits``: of routed experts, None = as stored; ``group``: weights per scale; ``zero_points``: a minimum beside
    each scale; ``ram``: ceiling of the process's memory in bytes, None = what the machine can spare."""

    bits: int | None
    group: int = 32
    zero_points: bool = False
    ram: int | None = None


@dataclass(frozen=True, slots=True)
class PackReport:
    """Bytes before and after, all and those of routed experts; ``resumed``: files found finished."""

    source_bytes: int
    packed_bytes: int
    source_expert_bytes: int
    packed_expert_bytes: int
    resumed: int


def pack_model(
    source: Path, output: Path, options: PackOptions, note: Callable[[str], object] = lambda text: None
) -> PackReport:
    """Write ``source`` packed to the new directory ``output``. An interrupted call, made again, goes on where it was.

    ``note`` is told what happens. Raises OutputExistsError, UsageError, ModelError kinds, BudgetError if ``ram`` is
    too small, StorageError if the disk is.
    """
    tune_malloc()
    if output.exists():
        raise OutputExistsError(f"{output} exists; remove it, or pack to another name")
    encoding = None if options.bits is None else encoding_for(options.bits, options.group, options.zero_points)
    model = load_model(source)
    files = plan_files(model, encoding)
    _check_memory(files, options.ram)
    settings = {
        "source": model.checkpoint.root.resolve().name,
        "fingerprint": model.checkpoint.fingerprint,
        "experts": encoding or "kept",
    }
    with Progress(output, settings) as progress:
        resumed = len(progress.done)
        _check_disk(files, progress)
        _write_all(model, files, progress, note)
        verify_unchanged(model.checkpoint)
        _copy_companions(model, progress.directory)
        _write_index(progress, files, settings)
        try:
            progress.finish(output)
            sync_directory(output.parent)
        except OSError as error:
            raise StorageError(f"cannot rename {progress.directory} to {output}: {error.strerror}") from error
    stored = sum(info.extent.nbytes for info in model.checkpoint.tensors.values())
    before, after = expert_bytes(files, model)
    return PackReport(stored, sum(file.nbytes for file in files), before, after, resumed)


def verify_packed(root: Path, note: Callable[[str], object] = lambda text: None) -> int:
    """Read every file of a packed model from the disk again and compare checksums; the number of bytes read.

    Raises CheckpointError naming the first file that differs, StorageError if reading fails.
    """
    index = read_pack_index(root)
    total = 0
    for number, file in enumerate(index.files):
        if _digest(shard_path(root, file.name)) != file.sha256:
            raise CheckpointError(
                f"{root / file.name} is damaged: its SHA-256 is not the one in {PACK_INDEX}; pack the model again"
            )
        total += file.nbytes
        note(f"verified {number + 1} of {len(index.files)} files")
    return total


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    try:
        with open(path, "rb", buffering=0) as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # ask the disk, not the page cache
            while data := file.read(_READ_BYTES):
                digest.update(data)
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing; pack the model again") from error
    except OSError as error:
        raise StorageError(f"cannot read {path}: {error.strerror}") from error
    return digest.hexdigest()


def _check_memory(files: list[FilePlan], ram: int | None) -> None:
    held = resident_bytes()
    limit = ram if ram is not None else default_ram_budget(available_memory(), held)
    needed = held + working_bytes(files)
    if needed > limit:
        raise BudgetError(
            f"packing this model takes {format_size(needed)} of memory, {format_size(limit)} are allowed; "
            f"give --ram {(needed >> 20) + 1}MiB or more",
            smallest=needed,
        )


def _check_disk(files: list[FilePlan], progress: Progress) -> None:
    needed = sum(file.nbytes for file in files if file.name not in progress.done) + _SPARE_DISK
    free = shutil.disk_usage(progress.directory).free
    if needed > free:
        raise StorageError(
            f"packing needs {format_size(needed)} more on the disk of {progress.directory}, {format_size(free)} are "
            "free; make room or pack to another disk"
        )


def _write_all(model: LoadedModel, files: list[FilePlan], progress: Progress, note: Callable[[str], object]) -> None:
    if progress.done:
        note(f"going on: {len(progress.done)} of {len(files)} files are done")
    for number, file in enumerate(files):
        if file.name not in progress.done:
            progress.add(write_file(model.checkpoint, file, progress.directory))
            note(f"packed {number + 1} of {len(files)} files ({format_size(file.nbytes)})")


def _copy_companions(model: LoadedModel, target: Path) -> None:
    """Configuration and tokenizer; links (as in the hub's cache) become files. A dtype that the source does not state
    is derived from its tensors, which are others now: state it."""
    source = model.checkpoint.root
    for name in _COMPANIONS:
        if not (source / name).is_file():
            continue
        data = (source / name).read_bytes()
        if name == "config.json" and not model.checkpoint.config.keys() & {"dtype", "torch_dtype"}:
            data = json.dumps({**model.checkpoint.config, "dtype": model.spec.dtype}, indent=2).encode()
        _write_durably(target / name, data)


def _write_index(progress: Progress, files: list[FilePlan], settings: dict[str, Any]) -> None:
    done: list[PackedFile] = [progress.done[file.name] for file in files]
    tensors = {
        item.target.name: [item.target.encoding, item.target.shape, number, item.target.extent.offset]
        for number, file in enumerate(files)
        for item in file.items
    }
    index = {
        "format": PACK_FORMAT,
        "version": PACK_VERSION,
        "settings": settings,
        "files": [{"name": file.name, "nbytes": file.nbytes, "sha256": file.sha256} for file in done],
        "tensors": tensors,
    }
    _write_durably(progress.directory / PACK_INDEX, json.dumps(index).encode())
    sync_directory(progress.directory)


def _write_durably(path: Path, data: bytes) -> None:
    try:
        with open(path, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error.strerror}") from error
