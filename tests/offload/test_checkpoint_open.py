"""Directories: config, single file or index, missing and truncated shards, links, pickles, changes under the run."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from batchgen_lite.errors import CheckpointError
from batchgen_lite.offload.checkpoint.directory import MAX_CONFIG_BYTES
from batchgen_lite.offload.checkpoint.files import verify_unchanged
from batchgen_lite.offload.checkpoint.matrices import TensorMatrix, read_dense
from batchgen_lite.offload.checkpoint.open import open_checkpoint
from batchgen_lite.offload.checkpoint.tensors import Checkpoint

A = torch.arange(12.0).view(3, 4)
B = torch.arange(8.0).view(2, 4).bfloat16()
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


@pytest.fixture
def single(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text('{"model_type": "x", "n": 1}')
    save_file({"a": A, "b": B}, tmp_path / "model.safetensors")
    return tmp_path


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    save_file({"a": A}, tmp_path / SHARDS[0])
    save_file({"b": B}, tmp_path / SHARDS[1])
    write_index(tmp_path, {"a": SHARDS[0], "b": SHARDS[1]})
    return tmp_path


def write_index(root: Path, weight_map: object) -> None:
    (root / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def check_content(checkpoint: Checkpoint) -> None:
    assert checkpoint.tensors.keys() == {"a", "b"}
    assert torch.equal(read_dense(checkpoint, TensorMatrix(checkpoint.tensors["a"])), A)
    assert torch.equal(read_dense(checkpoint, TensorMatrix(checkpoint.tensors["b"])), B.float())


def test_single_file(single: Path) -> None:
    checkpoint = open_checkpoint(single)
    check_content(checkpoint)
    assert checkpoint.format == "safetensors"
    assert checkpoint.config == {"model_type": "x", "n": 1}
    assert [file.path.name for file in checkpoint.files] == ["model.safetensors"]
    check_content(open_checkpoint(str(single)))


def test_shards(sharded: Path) -> None:
    checkpoint = open_checkpoint(sharded)
    check_content(checkpoint)
    assert [file.path.name for file in checkpoint.files] == list(SHARDS)


def test_opening_keeps_no_file_open(sharded: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    checkpoint = open_checkpoint(sharded)
    assert len(os.listdir("/proc/self/fd")) == before
    assert checkpoint.tensors


def test_missing_shard_is_named(sharded: Path) -> None:
    (sharded / SHARDS[1]).unlink()
    with pytest.raises(CheckpointError, match=f"1 of 2 weight files are missing, first {SHARDS[1]}"):
        open_checkpoint(sharded)


def test_truncated_shard_is_named_with_both_sizes(sharded: Path) -> None:
    path = sharded / SHARDS[1]
    size = path.stat().st_size
    os.truncate(path, size - 5)
    with pytest.raises(CheckpointError, match=rf"{SHARDS[1]} is truncated: expected {size} bytes, found {size - 5}"):
        open_checkpoint(sharded)
    os.truncate(path, 20)
    with pytest.raises(CheckpointError, match=rf"{SHARDS[1]} is truncated within its header"):
        open_checkpoint(sharded)


def test_index_lists_a_tensor_that_is_not_there(sharded: Path) -> None:
    write_index(sharded, {"a": SHARDS[0], "b": SHARDS[1], "c": SHARDS[1]})
    with pytest.raises(CheckpointError, match=r"tensor 'c' is missing"):
        open_checkpoint(sharded)


def test_shard_holds_a_tensor_that_is_not_listed(sharded: Path) -> None:
    save_file({"b": B, "extra": A}, sharded / SHARDS[1])
    with pytest.raises(CheckpointError, match=r"holds tensor 'extra', but .* does not list it"):
        open_checkpoint(sharded)


def test_tensor_lies_in_another_shard_than_listed(sharded: Path) -> None:
    write_index(sharded, {"a": SHARDS[1], "b": SHARDS[0]})
    with pytest.raises(CheckpointError, match=f"lists it in {SHARDS[1]}"):
        open_checkpoint(sharded)


@pytest.mark.parametrize(
    "name", ["../x.safetensors", "sub/x.safetensors", "/etc/x.safetensors", "..", "", "a\0.safetensors", "..\\x"]
)
def test_shard_names_stay_in_the_directory(sharded: Path, name: str) -> None:
    save_file({"b": B}, sharded.parent / "x.safetensors")
    write_index(sharded, {"a": SHARDS[0], "b": name})
    with pytest.raises(CheckpointError, match=r"not a plain file name|not a \.safetensors file"):
        open_checkpoint(sharded)


@pytest.mark.parametrize("weight_map", [None, {}, [], {"a": 1}, {"a": "pytorch_model.bin"}])
def test_bad_weight_maps(sharded: Path, weight_map: object) -> None:
    write_index(sharded, weight_map)
    with pytest.raises(CheckpointError, match=r"weight_map|only safetensors"):
        open_checkpoint(sharded)


def test_index_with_a_duplicate_tensor(sharded: Path) -> None:
    text = f'{{"weight_map": {{"a": "{SHARDS[0]}", "a": "{SHARDS[1]}", "b": "{SHARDS[1]}"}}}}'
    (sharded / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError, match="duplicate key 'a'"):
        open_checkpoint(sharded)


def test_links_out_of_the_directory_are_refused(sharded: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "w.safetensors"
    (sharded / SHARDS[1]).rename(elsewhere)
    (sharded / SHARDS[1]).symlink_to(elsewhere)
    with pytest.raises(CheckpointError, match="outside the checkpoint"):
        open_checkpoint(sharded)


def test_links_inside_the_directory_are_fine(sharded: Path) -> None:
    (sharded / SHARDS[1]).rename(sharded / "real")
    (sharded / SHARDS[1]).symlink_to("real")
    check_content(open_checkpoint(sharded))


def test_hub_cache_snapshots_link_to_their_blobs(sharded: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    repository = tmp_path_factory.mktemp("hub") / "models--o--n"
    snapshot = repository / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    for number, path in enumerate(sorted(sharded.iterdir())):
        path.rename(repository / "blobs" / f"{number:040x}")
        (snapshot / path.name).symlink_to(Path("../../blobs") / f"{number:040x}")
    check_content(open_checkpoint(snapshot))
    link = repository.parent / "link"
    link.symlink_to(snapshot)
    check_content(open_checkpoint(link))
    folder = snapshot / "text"
    folder.mkdir()
    for path in list(snapshot.glob("*.*")):
        (folder / path.name).symlink_to(path.resolve())
    check_content(open_checkpoint(folder))
    # A blob of another repository is not ours.
    other = repository.parent / "models--o--m" / "blobs"
    other.mkdir(parents=True)
    (repository / "blobs" / f"{2:040x}").rename(other / "w")
    (snapshot / SHARDS[1]).unlink()
    (snapshot / SHARDS[1]).symlink_to(other / "w")
    with pytest.raises(CheckpointError, match="outside the checkpoint"):
        open_checkpoint(snapshot)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt"])
def test_pickled_weights_are_refused_with_a_hint(tmp_path: Path, name: str) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / name).write_bytes(b"x")
    with pytest.raises(CheckpointError, match=f"only pickled weights .{name}.*use a safetensors version"):
        open_checkpoint(tmp_path)


def test_directories_without_weights(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        open_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="has no weights"):
        open_checkpoint(tmp_path)
    (tmp_path / "stray.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"stray\.safetensors alone"):
        open_checkpoint(tmp_path)
    (tmp_path / "m.gguf").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"pass one of them itself, for example .*m\.gguf"):
        open_checkpoint(tmp_path)


def test_paths_that_are_no_models(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such model"):
        open_checkpoint(tmp_path / "absent")
    (tmp_path / "x.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"neither a directory nor a \.gguf file"):
        open_checkpoint(tmp_path / "x.bin")


@pytest.mark.parametrize("text", ["", "[]", "{", '{"a": NaN}', '{"a": 1, "a": 2}', "[" * 100_000])
def test_bad_configs(single: Path, text: str) -> None:
    (single / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        open_checkpoint(single)


def test_configs_have_a_size_limit(single: Path) -> None:
    (single / "config.json").write_text("{" + " " * MAX_CONFIG_BYTES + "}")
    with pytest.raises(CheckpointError, match=f"more than the {MAX_CONFIG_BYTES} allowed"):
        open_checkpoint(single)


def test_verify_unchanged_sees_every_kind_of_change(single: Path) -> None:
    path = single / "model.safetensors"
    checkpoint = open_checkpoint(single)
    verify_unchanged(checkpoint)
    status = path.stat()
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1_000_000))
    with pytest.raises(CheckpointError, match=r"model\.safetensors changed during the run: modification time"):
        verify_unchanged(checkpoint)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    verify_unchanged(checkpoint)

    data = path.read_bytes()
    os.truncate(path, len(data) - 1)
    with pytest.raises(CheckpointError, match=f"size was {len(data)}, is {len(data) - 1}"):
        verify_unchanged(checkpoint)

    replacement = single / "new"
    replacement.write_bytes(data)
    os.utime(replacement, ns=(status.st_atime_ns, status.st_mtime_ns))
    replacement.rename(path)
    with pytest.raises(CheckpointError, match="inode"):
        verify_unchanged(checkpoint)
    path.unlink()
    with pytest.raises(CheckpointError, match="cannot open"):
        verify_unchanged(checkpoint)


def test_fingerprint_follows_the_content(single: Path) -> None:
    first = open_checkpoint(single).fingerprint
    assert open_checkpoint(single).fingerprint == first
    (single / "config.json").write_text('{"n": 1, "model_type": "x"}')
    assert open_checkpoint(single).fingerprint == first  # the order of keys says nothing
    (single / "config.json").write_text('{"n": 2, "model_type": "x"}')
    changed = open_checkpoint(single).fingerprint
    assert changed != first
    save_file({"a": A.view(4, 3).contiguous(), "b": B}, single / "model.safetensors")
    assert open_checkpoint(single).fingerprint not in (first, changed)


def test_read_dense_reports_a_file_that_shrank(single: Path) -> None:
    checkpoint = open_checkpoint(single)
    os.truncate(checkpoint.files[0].path, checkpoint.files[0].size - 1)
    last = max(checkpoint.tensors.values(), key=lambda info: info.extent.offset)
    with pytest.raises(CheckpointError, match=r"model\.safetensors is truncated"):
        read_dense(checkpoint, TensorMatrix(last))
