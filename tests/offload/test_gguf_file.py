"""GGUF files: metadata and extents as the gguf package finds them, split files, damaged and hostile headers."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from batchgen_lite.errors import CheckpointError, UnsupportedError
from batchgen_lite.offload.checkpoint.matrices import TensorMatrix, read_dense
from batchgen_lite.offload.checkpoint.open import open_checkpoint

RNG = np.random.default_rng(7)
DENSE = RNG.standard_normal((6, 64), dtype=np.float32)
STACK = RNG.standard_normal((3, 4, 32), dtype=np.float32)


def write_gguf(path: Path, split: tuple[int, int, int] | None = None, names: str = "ab") -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny é")
    writer.add_block_count(2)
    writer.add_float32("x.float", 1e-5)
    writer.add_float64("x.double", 0.1)
    writer.add_bool("x.flag", True)
    writer.add_int64("x.negative", -(2**40))
    writer.add_uint8("x.byte", 200)
    writer.add_token_list(["<s>", "a", "é\n", ""])
    writer.add_token_scores([0.0, -1.5, -2.0, 1.0])
    writer.add_token_types([3, 1, 1, 6])
    writer.add_array("x.flags", [True, False])
    if split is not None:
        number, count, tensors = split
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", count)
        writer.add_int32("split.tensors.count", tensors)
    if "a" in names:
        writer.add_tensor("a", DENSE)
        q8 = gguf.quantize(DENSE, gguf.GGMLQuantizationType.Q8_0)
        writer.add_tensor("a.q", q8, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    if "b" in names:
        writer.add_tensor("b", STACK.astype(np.float16))
        writer.add_tensor("b.v", DENSE[0])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_metadata_and_extents_are_those_of_the_gguf_package(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf")
    checkpoint = open_checkpoint(path)
    reader = gguf.GGUFReader(path)
    fields = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    assert checkpoint.metadata == fields
    assert checkpoint.metadata["general.name"] == "tiny é"
    assert checkpoint.format == "gguf"
    assert checkpoint.config == {}
    assert set(checkpoint.tensors) == {tensor.name for tensor in reader.tensors}
    for tensor in reader.tensors:
        info = checkpoint.tensors[tensor.name]
        assert info.encoding == tensor.tensor_type.name
        assert info.shape == tuple(reversed(tensor.shape.tolist()))
        assert (info.extent.offset, info.extent.nbytes) == (tensor.data_offset, tensor.n_bytes)


def test_content(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf"))
    assert torch.equal(read_dense(checkpoint, TensorMatrix(checkpoint.tensors["a"])), torch.from_numpy(DENSE))
    assert torch.equal(read_dense(checkpoint, TensorMatrix(checkpoint.tensors["b.v"])), torch.from_numpy(DENSE[:1]))
    assert checkpoint.tensors["b"].shape == (3, 4, 32)


def test_opening_maps_nothing_and_keeps_nothing_open(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf")
    before = len(os.listdir("/proc/self/fd"))
    checkpoint = open_checkpoint(path)
    assert len(os.listdir("/proc/self/fd")) == before
    assert "m.gguf" not in Path("/proc/self/maps").read_text()
    assert checkpoint.tensors


def test_links_to_files_elsewhere_are_followed(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Unlike shard names, which a downloaded file dictates, the path comes from the user."""
    link = tmp_path / "link.gguf"
    link.symlink_to(write_gguf(tmp_path_factory.mktemp("elsewhere") / "m.gguf"))
    checkpoint = open_checkpoint(link)
    assert torch.equal(read_dense(checkpoint, TensorMatrix(checkpoint.tensors["a"])), torch.from_numpy(DENSE))


def split_paths(root: Path) -> list[Path]:
    return [root / f"m-{n:05d}-of-00002.gguf" for n in (1, 2)]


def write_split(root: Path) -> list[Path]:
    paths = split_paths(root)
    write_gguf(paths[0], (0, 2, 4), "a")
    write_gguf(paths[1], (1, 2, 4), "b")
    return paths


@pytest.mark.parametrize("entry", [0, 1])
def test_split_files_open_from_any_part(tmp_path: Path, entry: int) -> None:
    paths = write_split(tmp_path)
    checkpoint = open_checkpoint(paths[entry])
    assert [file.path for file in checkpoint.files] == paths
    assert set(checkpoint.tensors) == {"a", "a.q", "b", "b.v"}
    assert checkpoint.tensors["b.v"].extent.file == 1
    assert torch.equal(read_dense(checkpoint, TensorMatrix(checkpoint.tensors["b.v"])), torch.from_numpy(DENSE[:1]))


def test_split_files_are_checked_against_each_other(tmp_path: Path) -> None:
    paths = write_split(tmp_path)
    write_gguf(paths[1], (1, 2, 4), "a")
    with pytest.raises(CheckpointError, match="tensor 'a' is in an earlier part too"):
        open_checkpoint(paths[0])
    write_gguf(paths[1], (0, 2, 4), "b")
    with pytest.raises(CheckpointError, match="named part 2 of 2"):
        open_checkpoint(paths[0])
    write_gguf(paths[1], None, "b")
    with pytest.raises(CheckpointError, match=r"split\.no None"):
        open_checkpoint(paths[0])
    write_gguf(paths[0], (0, 2, 5), "a")
    write_gguf(paths[1], (1, 2, 5), "b")
    with pytest.raises(CheckpointError, match="hold 4 tensors, the first says 5"):
        open_checkpoint(paths[0])
    paths[1].unlink()
    with pytest.raises(CheckpointError, match="part 2 of 2 is missing"):
        open_checkpoint(paths[0])
    paths[0].rename(tmp_path / "renamed.gguf")
    with pytest.raises(CheckpointError, match="one of 2 parts"):
        open_checkpoint(tmp_path / "renamed.gguf")


def test_truncation_names_the_file_and_both_sizes(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf")
    # The writer pads the last tensor, so the data end before the file does.
    end = max(info.extent.offset + info.extent.nbytes for info in open_checkpoint(path).tensors.values())
    os.truncate(path, end - 1)
    with pytest.raises(CheckpointError, match=rf"m\.gguf is truncated: at least {end} bytes expected, {end - 1} found"):
        open_checkpoint(path)


def test_every_truncation_of_the_header_is_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "cut.gguf")
    start = min(info.extent.offset for info in open_checkpoint(path).tensors.values())
    for length in range(start - 1, -1, -1):
        os.truncate(path, length)
        with pytest.raises(CheckpointError, match=r"cut\.gguf"):
            open_checkpoint(path)


@given(edits=st.lists(st.tuples(st.integers(4, 900), st.integers(0, 255)), min_size=1, max_size=4))
def test_random_damage_ends_in_our_errors_or_in_valid_extents(
    tmp_path_factory: pytest.TempPathFactory, edits: list[tuple[int, int]]
) -> None:
    folder = tmp_path_factory.getbasetemp()
    original = folder / "original.gguf"
    if not original.exists():
        write_gguf(original)
    damaged = bytearray(original.read_bytes())
    for at, value in edits:
        damaged[at] = value
    path = folder / "damaged.gguf"
    path.write_bytes(damaged)
    try:
        checkpoint = open_checkpoint(path)
    except (CheckpointError, UnsupportedError):
        return
    for info in checkpoint.tensors.values():
        assert 0 <= info.extent.offset <= info.extent.offset + info.extent.nbytes <= len(damaged)


def string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def record(name: str = "t", dims: tuple[int, ...] = (32,), kind: int = 0, offset: int = 0) -> bytes:
    return string(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def key(name: str, kind: int, value: bytes) -> bytes:
    return string(name) + struct.pack("<I", kind) + value


def raw(
    tensors: list[bytes], keys: list[bytes], counts: tuple[int, int] | None = None, version: int = 3, data: int = 256
) -> bytes:
    counts = counts or (len(tensors), len(keys))
    head = b"GGUF" + struct.pack("<IQQ", version, *counts) + b"".join(keys) + b"".join(tensors)
    return head + bytes(-len(head) % 32) + bytes(data)


U32 = struct.Struct("<I").pack
HOSTILE: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "not a GGUF file"),
    "other magic": (b"GGML" + bytes(60), "not a GGUF file"),
    "tensor count": (raw([], [], (2**63, 0)), "cannot fit"),
    "key count": (raw([], [], (0, 2**60)), "cannot fit"),
    "string length": (raw([], [struct.pack("<Q", 2**62)]), "a string of"),
    "string value length": (raw([], [key("k", 8, struct.pack("<Q", 2**62))]), "a string of"),
    "endless array": (raw([], [key("k", 9, U32(0) + struct.pack("<Q", 2**60))]), "cannot fit"),
    "array longer than the file": (raw([], [key("k", 9, U32(10) + struct.pack("<Q", 100))]), "truncated or damaged"),
    "array of strings beyond the file": (raw([], [key("k", 9, U32(8) + struct.pack("<Q", 500))]), "cannot fit"),
    "duplicate key": (raw([], [key("k", 0, b"1")] * 2), "duplicate key"),
    "key not utf-8": (raw([], [struct.pack("<Q", 1) + b"\xff" + U32(0) + b"1"]), "not UTF-8"),
    "duplicate tensor": (raw([record(), record(offset=128)], []), "listed twice"),
    "no dimensions": (raw([record(dims=())], []), "0 dimensions"),
    "five dimensions": (raw([record(dims=(1,) * 5)], []), "5 dimensions"),
    "zero dimension": (raw([record(dims=(0,))], []), "has shape"),
    "size overflow": (raw([record(dims=(2**40, 2**40))], []), "has shape"),
    "size wraps to zero": (raw([record(dims=(2**32, 2**32))], []), "has shape"),
    "beyond the file": (raw([record(dims=(1024,))], []), "truncated"),
    "offset beyond the file": (raw([record(offset=2**63)], []), "truncated"),
    "offset not aligned": (raw([record(offset=4)], []), "alignment"),
    "overlap": (raw([record("a"), record("b", offset=96)], []), "overlaps"),
    "half a block": (raw([record(dims=(48,), kind=8)], []), "not multiples"),
    "alignment 0": (raw([record()], [key("general.alignment", 4, U32(0))]), "alignment"),
    "alignment 24": (raw([record()], [key("general.alignment", 4, U32(24))]), "alignment"),
    "alignment a string": (raw([record()], [key("general.alignment", 8, string("x"))]), "alignment"),
    "split count negative": (raw([record()], [key("split.count", 5, struct.pack("<i", -1))]), r"split\.count"),
    "split count a string": (raw([record()], [key("split.count", 8, string("2"))]), r"split\.count"),
}
UNSUPPORTED: dict[str, tuple[bytes, str]] = {
    "version 1": (raw([record()], [], version=1), "version 1"),
    "version 4": (raw([record()], [], version=4), "version 4"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0) + bytes(64), "big-endian"),
    "unknown tensor type": (raw([record(kind=4)], []), "ggml type 4"),
    "unknown value type": (raw([], [key("k", 13, b"1")]), "value type 13"),
    "array of arrays": (raw([], [key("k", 9, U32(9) + struct.pack("<Q", 1))]), "value type 9"),
}


def test_the_hand_made_header_is_valid_when_nothing_is_wrong(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(raw([record("a"), record("b", offset=128)], [key("k", 0, b"1")]))
    assert set(open_checkpoint(path).tensors) == {"a", "b"}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_headers(tmp_path: Path, name: str) -> None:
    data, message = HOSTILE[name]
    path = tmp_path / "x.gguf"
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(path)


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_unsupported_headers(tmp_path: Path, name: str) -> None:
    data, message = UNSUPPORTED[name]
    path = tmp_path / "x.gguf"
    path.write_bytes(data)
    with pytest.raises(UnsupportedError, match=message):
        open_checkpoint(path)


def test_tensors_of_types_that_cannot_be_widened_are_refused_when_used(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    kind = gguf.GGMLQuantizationType.IQ2_XXS
    path.write_bytes(raw([record(dims=(256,), kind=kind.value)], []))
    info = open_checkpoint(path).tensors["t"]
    with pytest.raises(UnsupportedError, match=r"stored as IQ2_XXS.*supported encodings: .*Q4_K"):
        TensorMatrix(info)
