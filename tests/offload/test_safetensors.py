"""Headers of safetensors files: whatever the safetensors library refuses, we refuse, and what it reads, we find."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save

from batchgen_lite.errors import CheckpointError
from batchgen_lite.offload.checkpoint import safetensors as ours
from batchgen_lite.offload.checkpoint.safetensors import read_safetensors


def entry(dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def file_of(header: dict[str, Any] | str | bytes, data: bytes = b"", length: int | None = None) -> bytes:
    if isinstance(header, dict):
        header = json.dumps(header)
    raw = header.encode() if isinstance(header, str) else header
    return struct.pack("<Q", len(raw) if length is None else length) + raw + data


def nested(depth: int) -> str:
    return '{"a":' * depth + "1" + "}" * depth


GOOD = {"a": entry()}
REFUSED_BY_BOTH: dict[str, bytes] = {
    "empty file": b"",
    "seven bytes": b"1234567",
    "header length beyond the file": file_of(GOOD, bytes(8), length=1000),
    "header length 2^63": file_of(GOOD, bytes(8), length=2**63),
    "header length 2^64-1": file_of(GOOD, bytes(8), length=2**64 - 1),
    "header length over the cap": file_of(GOOD, bytes(8), length=100_000_001),
    "empty header": file_of("", b""),
    "not json": file_of("{nonsense}", b""),
    "truncated json": file_of('{"a": {"dtype": "F32"', b""),
    "json array": file_of("[]", b""),
    "json number": file_of("1", b""),
    "trailing garbage": file_of('{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}} x', bytes(8)),
    "trailing zero bytes": file_of(b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}\0\0', bytes(8)),
    "not utf-8": file_of(b'{"\xff":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}', bytes(8)),
    "byte order mark": file_of(b'\xef\xbb\xbf{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}', bytes(8)),
    "lone surrogate in a name": file_of('{"\\ud800":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}', bytes(8)),
    "lone surrogate in metadata": file_of({"__metadata__": {"k": "\ud800"}, "a": entry()}, bytes(8)),
    "deep nesting": file_of(nested(100_000), b""),
    "unknown dtype": file_of({"a": entry("F31")}, bytes(8)),
    "lower-case dtype": file_of({"a": entry("f32")}, bytes(8)),
    "dtype not a string": file_of({"a": entry(32)}, bytes(8)),
    "dtype null": file_of({"a": entry(None)}, bytes(8)),
    "no dtype": file_of({"a": {"shape": [2], "data_offsets": [0, 8]}}, bytes(8)),
    "no shape": file_of({"a": {"dtype": "F32", "data_offsets": [0, 8]}}, bytes(8)),
    "no offsets": file_of({"a": {"dtype": "F32", "shape": [2]}}, bytes(8)),
    "duplicate field": file_of('{"a":{"dtype":"F32","dtype":"F32","shape":[2],"data_offsets":[0,8]}}', bytes(8)),
    "entry is a list": file_of({"a": []}, b""),
    "entry is null": file_of({"a": None}, b""),
    "negative dimension": file_of({"a": entry(shape=(-2,))}, bytes(8)),
    "minus zero dimension": file_of('{"a":{"dtype":"F32","shape":[-0],"data_offsets":[0,0]}}', b""),
    "fractional dimension": file_of({"a": entry(shape=(2.0,))}, bytes(8)),
    "true as dimension": file_of({"a": entry("F32", (True, 2))}, bytes(8)),
    "text as dimension": file_of({"a": entry(shape=("2",))}, bytes(8)),
    "shape is a number": file_of({"a": entry(shape=2)}, bytes(8)),
    "shape of 2^64": file_of({"a": entry(shape=(2**64,))}, bytes(8)),
    "shape product overflows": file_of({"a": entry(shape=(2**40, 2**40))}, bytes(8)),
    "shape product wraps to the right size": file_of({"a": entry("U8", (2**63, 2, 8))}, bytes(8)),
    "NaN as offset": file_of('{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,NaN]}}', bytes(8)),
    "shape smaller than the range": file_of({"a": entry(shape=(1,))}, bytes(8)),
    "shape larger than the range": file_of({"a": entry(shape=(3,))}, bytes(8)),
    "three offsets": file_of({"a": entry(offsets=(0, 8, 8))}, bytes(8)),
    "one offset": file_of({"a": entry(offsets=(8,))}, bytes(8)),
    "offsets reversed": file_of({"a": entry(offsets=(8, 0))}, bytes(8)),
    "negative offset": file_of({"a": entry(offsets=(-8, 0))}, bytes(8)),
    "offset 2^64": file_of({"a": entry(offsets=(2**64, 2**64 + 8))}, bytes(8)),
    "range beyond the file": file_of({"a": entry()}, bytes(4)),
    "no data at all": file_of({"a": entry()}, b""),
    "bytes behind the last tensor": file_of({"a": entry()}, bytes(9)),
    "data without tensors": file_of({}, bytes(8)),
    "hole in front": file_of({"a": entry(offsets=(8, 16))}, bytes(16)),
    "hole between": file_of({"a": entry(), "b": entry(offsets=(16, 24))}, bytes(24)),
    "overlap": file_of({"a": entry(), "b": entry(offsets=(4, 12))}, bytes(12)),
    "same range twice": file_of({"a": entry(), "b": entry()}, bytes(8)),
    "range inside another": file_of({"a": entry(shape=(4,), offsets=(0, 16)), "b": entry(offsets=(4, 12))}, bytes(16)),
    "half a byte": file_of({"a": entry("F4", (3,), (0, 2))}, bytes(2)),
    "metadata not an object": file_of({"__metadata__": [], "a": entry()}, bytes(8)),
    "metadata with a number": file_of({"__metadata__": {"k": 1}, "a": entry()}, bytes(8)),
    "metadata with an object": file_of({"__metadata__": {"k": {}}, "a": entry()}, bytes(8)),
}
STRICTER: dict[str, bytes] = {
    "duplicate name, same entry": file_of(
        '{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}',
        bytes(8),
    ),
    "space in front": file_of(" " + json.dumps(GOOD), bytes(8)),
    "unknown field": file_of({"a": {**entry(), "stride": 1}}, bytes(8)),
    "name of 2 KB": file_of({"a" * 2000: entry()}, bytes(8)),
    "70 dimensions": file_of({"a": entry(shape=(1,) * 69 + (2,))}, bytes(8)),
}


def write(folder: Path, data: bytes) -> Path:
    path = folder / "x.safetensors"
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("name", REFUSED_BY_BOTH)
def test_refuses_what_the_library_refuses(tmp_path: Path, name: str) -> None:
    data = REFUSED_BY_BOTH[name]
    with pytest.raises(safetensors.SafetensorError):
        safetensors.deserialize(data)
    with pytest.raises(CheckpointError, match=r"x\.safetensors"):
        read_safetensors(write(tmp_path, data), 0)


@pytest.mark.parametrize("name", STRICTER)
def test_refuses_more_than_the_library(tmp_path: Path, name: str) -> None:
    safetensors.deserialize(STRICTER[name])
    with pytest.raises(CheckpointError, match=r"x\.safetensors"):
        read_safetensors(write(tmp_path, STRICTER[name]), 0)


GOOD_FILES: dict[str, bytes] = {
    "no tensors": file_of({}),
    "one": file_of(GOOD, bytes(8)),
    "padded header": file_of(json.dumps(GOOD) + " " * 7, bytes(8)),
    "metadata": file_of({"__metadata__": {"format": "pt"}, **GOOD}, bytes(8)),
    "empty tensor": file_of({"e": entry(shape=(0, 4), offsets=(0, 0)), "a": entry()}, bytes(8)),
    "empty tensor behind": file_of({"e": entry(shape=(0,), offsets=(8, 8)), "a": entry()}, bytes(8)),
    "scalar": file_of({"a": entry(shape=(), offsets=(0, 4))}, bytes(4)),
    "later in the header, earlier in the data": file_of({"b": entry(offsets=(8, 16)), "a": entry()}, bytes(16)),
    "escaped name": file_of('{"\\u00e9\\n":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}', bytes(8)),
    "four bits": file_of({"a": entry("F4", (4,), (0, 2))}, bytes(2)),
    "six bits": file_of({"a": entry("F6_E2M3", (4,), (0, 3))}, bytes(3)),
}


@pytest.mark.parametrize("name", GOOD_FILES)
def test_reads_what_is_valid(tmp_path: Path, name: str) -> None:
    compare_with_library(tmp_path, GOOD_FILES[name])


@pytest.mark.parametrize("dtype", sorted(ours._DTYPE_BITS))
def test_every_dtype_has_the_library_s_size(tmp_path: Path, dtype: str) -> None:
    nbytes = ours._DTYPE_BITS[dtype]  # 8 elements
    data = file_of({"a": entry(dtype, (8,), (0, nbytes))}, bytes(range(nbytes)))
    compare_with_library(tmp_path, data)


def compare_with_library(folder: Path, data: bytes) -> None:
    expected = dict(safetensors.deserialize(data))
    identity, tensors = read_safetensors(write(folder, data), 3)
    assert identity.size == len(data)
    assert tensors.keys() == expected.keys()
    for name, info in tensors.items():
        assert info.name == name
        assert info.extent.file == 3
        assert info.encoding == expected[name]["dtype"]
        assert list(info.shape) == expected[name]["shape"]
        stored = data[info.extent.offset : info.extent.offset + info.extent.nbytes]
        assert stored == bytes(expected[name]["data"])


SEED = save({"a.weight": torch.arange(6.0).view(2, 3), "b": torch.arange(5).bfloat16()}, {"format": "pt"})


@given(
    edits=st.lists(st.tuples(st.integers(0, len(SEED) - 1), st.integers(0, 255)), max_size=3),
    cut=st.integers(-9, 9),
)
def test_random_damage_is_never_accepted_where_the_library_refuses(
    tmp_path_factory: pytest.TempPathFactory, edits: list[tuple[int, int]], cut: int
) -> None:
    damaged = bytearray(SEED)
    for at, value in edits:
        damaged[at] = value
    data = bytes(damaged[:cut] if cut < 0 else damaged + bytes(cut))
    folder = tmp_path_factory.getbasetemp()
    try:
        safetensors.deserialize(data)
    except safetensors.SafetensorError:
        with pytest.raises(CheckpointError):
            read_safetensors(write(folder, data), 0)
        return
    try:
        read_safetensors(write(folder, data), 0)
    except CheckpointError:
        return  # stricter than the library is fine
    compare_with_library(folder, data)


def test_every_digit_of_the_header_matters(tmp_path: Path) -> None:
    """Replace each digit of the header by each other digit: no variant may be read in another way than the library."""
    for at, byte in enumerate(SEED):
        if at < 8 or not chr(byte).isdigit() or at >= len(SEED) - 34:
            continue
        for digit in b"0123456789":
            data = SEED[:at] + bytes([digit]) + SEED[at + 1 :]
            try:
                safetensors.deserialize(data)
            except safetensors.SafetensorError:
                with pytest.raises(CheckpointError):
                    read_safetensors(write(tmp_path, data), 0)
            else:
                compare_with_library(tmp_path, data)


def test_truncation_names_both_sizes(tmp_path: Path) -> None:
    path = write(tmp_path, SEED[:-3])
    with pytest.raises(CheckpointError, match=f"truncated: expected {len(SEED)} bytes, found {len(SEED) - 3}"):
        read_safetensors(path, 0)


def test_only_regular_files(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="not a regular file"):
        read_safetensors(tmp_path, 0)
    with pytest.raises(CheckpointError, match="cannot open"):
        read_safetensors(tmp_path / "absent.safetensors", 0)
