"""A directory of safetensors files as Hugging Face lays it out: config.json, one file or an index over shards."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from batchgen_lite.errors import CheckpointError
from batchgen_lite.offload.checkpoint.files import read_limited, shard_path
from batchgen_lite.offload.checkpoint.safetensors import read_safetensors
from batchgen_lite.offload.checkpoint.strict_json import parse_object
from batchgen_lite.offload.checkpoint.tensors import CheckpointFile, TensorInfo

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
MAX_CONFIG_BYTES = 16 << 20
MAX_INDEX_BYTES = 100_000_000

_PICKLES = (".bin", ".pt", ".pth", ".ckpt")

Weights = tuple[tuple[CheckpointFile, ...], dict[str, TensorInfo]]


def read_config(root: Path) -> dict[str, Any]:
    """config.json of ``root``; CheckpointError if it is missing, too large or not a JSON object."""
    path = root / "config.json"
    if not path.exists():
        raise CheckpointError(f"{root} has no config.json; pass the directory that holds a model's config and weights")
    return parse_object(read_limited(shard_path(root, path.name), MAX_CONFIG_BYTES), str(path))


def read_weights(root: Path) -> Weights:
    """Files and tensors of ``root``. model.safetensors goes before an index, as in transformers.

    Raises CheckpointError if there are no safetensors files, a shard is missing, damaged or outside ``root``, or index
    and shards disagree in either direction.
    """
    if (root / SINGLE_FILE).exists():
        file, tensors = read_safetensors(shard_path(root, SINGLE_FILE), 0)
        return (file,), tensors
    if (root / INDEX_FILE).exists():
        return _read_shards(root, _read_weight_map(root))
    raise CheckpointError(_why_no_weights(root))


def _read_weight_map(root: Path) -> dict[str, str]:
    path = root / INDEX_FILE
    index = parse_object(read_limited(shard_path(root, INDEX_FILE), MAX_INDEX_BYTES), str(path))
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path}: weight_map is missing or empty")
    for name, shard in weight_map.items():
        if not isinstance(shard, str):
            raise CheckpointError(f"{path}: weight_map gives no file name for tensor {name[:200]!r}")
        if not shard.endswith(".safetensors"):
            raise CheckpointError(f"{path}: shard {shard[:200]!r} is not a .safetensors file; only safetensors is read")
    return weight_map


def _read_shards(root: Path, weight_map: Mapping[str, str]) -> Weights:
    shards = sorted(set(weight_map.values()))
    paths = [shard_path(root, shard) for shard in shards]
    missing = [shard for shard, path in zip(shards, paths, strict=True) if not path.exists()]
    if missing:
        raise CheckpointError(
            f"{root}: {len(missing)} of {len(shards)} weight files are missing, first {missing[0]}; download them again"
        )
    files: list[CheckpointFile] = []
    tensors: dict[str, TensorInfo] = {}
    for number, (shard, path) in enumerate(zip(shards, paths, strict=True)):
        file, found = read_safetensors(path, number)
        files.append(file)
        for name, info in found.items():
            if weight_map.get(name) != shard:
                listed = f"lists it in {weight_map[name]}" if name in weight_map else "does not list it"
                raise CheckpointError(f"{path} holds tensor {name[:200]!r}, but {INDEX_FILE} {listed}")
            tensors[name] = info
    for name, shard in weight_map.items():
        if name not in tensors:
            raise CheckpointError(
                f"{root / shard}: tensor {name[:200]!r} is missing, though {INDEX_FILE} lists it there"
            )
    return tuple(files), tensors


def _why_no_weights(root: Path) -> str:
    names = sorted(path.name for path in root.iterdir())
    wanted = f"{SINGLE_FILE} or {INDEX_FILE}"
    pickles = [name for name in names if name.endswith(_PICKLES)]
    ggufs = [name for name in names if name.endswith(".gguf")]
    others = [name for name in names if name.endswith(".safetensors")]
    if ggufs:
        return f"{root} has no {wanted}, but GGUF files; pass one of them itself, for example {root / ggufs[0]}"
    if others:
        return f"{root} has no {wanted}; {others[0]} alone does not say whether it is complete"
    if pickles:
        return (
            f"{root} has only pickled weights ({pickles[0]}), which can run code when loaded and are not read; "
            "use a safetensors version of the model, or convert it with transformers (save_pretrained)"
        )
    return f"{root} has no weights: {wanted} expected"
