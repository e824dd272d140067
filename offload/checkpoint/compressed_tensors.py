"""The compressed-tensors family of schemes: pack-quantized, int-quantized and float-quantized weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from batchgen_lite.errors import CheckpointError, UnsupportedError
from batchgen_lite.offload.checkpoint.companions import expect, typed
from batchgen_lite.offload.checkpoint.dense import read_extent
from batchgen_lite.offload.checkpoint.fp8_matrix import Fp8BlockMatrix
from batchgen_lite.offload.checkpoint.matrix import Matrix
from batchgen_lite.offload.checkpoint.packed_int_matrix import Int8Matrix, PackedIntMatrix
from batchgen_lite.offload.checkpoint.scheme_settings import SuffixScheme, group_size, only, unset
from batchgen_lite.offload.checkpoint.tensors import Checkpoint, TensorInfo

_METHOD = "compressed-tensors"


@dataclass(frozen=True)
class PackedScheme(SuffixScheme):
    """ "pack-quantized". ``group`` None: one group a row."""

    bits: int
    group: int | None
    symmetric: bool
    method: ClassVar[str] = _METHOD
    layouts: ClassVar[tuple[tuple[str, ...], ...]] = ((".weight_packed", ".weight_scale", ".weight_shape"),)
    optional: ClassVar[tuple[str, ...]] = (".weight_zero_point", ".weight_g_idx")

    def build(self, checkpoint: Checkpoint, tensors: Mapping[str, TensorInfo]) -> Matrix:
        packed = tensors[".weight_packed"]
        if ".weight_g_idx" in tensors:
            raise UnsupportedError(f"{packed.name!r} comes with weight_g_idx (activation order), not implemented")
        zero_point = tensors.get(".weight_zero_point")
        if (zero_point is None) != self.symmetric:
            stated = "symmetric" if self.symmetric else "asymmetric"
            raise CheckpointError(f"{packed.name!r}: weights are {stated}, but weight_zero_point disagrees")
        rows, cols = self._stored_shape(checkpoint, tensors[".weight_shape"])
        if packed.shape[:1] != (rows,):
            raise CheckpointError(f"{packed.name!r} has shape {list(packed.shape)}, weight_shape says {rows} x {cols}")
        return PackedIntMatrix(packed, tensors[".weight_scale"], zero_point, cols, self.group or cols, self.bits)

    @staticmethod
    def _stored_shape(checkpoint: Checkpoint, tensor: TensorInfo) -> tuple[int, int]:
        """The two numbers that ``weight_shape`` holds; a read of 16 bytes."""
        expect(tensor, ("I64", "I32"), (2,))
        dtype = torch.int64 if tensor.encoding == "I64" else torch.int32
        rows, cols = typed(read_extent(checkpoint, tensor.extent), dtype).tolist()
        return rows, cols


@dataclass(frozen=True)
class Int8Scheme(SuffixScheme):
    """ "int-quantized": int8 weights with a scale per row."""

    method: ClassVar[str] = _METHOD
    layouts: ClassVar[tuple[tuple[str, ...], ...]] = ((".weight", ".weight_scale"),)
    optional: ClassVar[tuple[str, ...]] = (".weight_zero_point",)
    shares_weight_name: ClassVar[bool] = True

    def build(self, checkpoint: Checkpoint, tensors: Mapping[str, TensorInfo]) -> Matrix:
        if ".weight_zero_point" in tensors:
            raise UnsupportedError(
                f"{tensors['.weight'].name!r} comes with weight_zero_point, not implemented for int8"
            )
        return Int8Matrix(tensors[".weight"], tensors[".weight_scale"])


@dataclass(frozen=True)
class FloatScheme(SuffixScheme):
    """ "float-quantized": E4M3 weights; a scale per tensor, per row, or per ``block``."""

    strategy: str
    block: tuple[int, int] | None
    method: ClassVar[str] = _METHOD
    layouts: ClassVar[tuple[tuple[str, ...], ...]] = ((".weight", ".weight_scale"),)
    shares_weight_name: ClassVar[bool] = True

    def build(self, checkpoint: Checkpoint, tensors: Mapping[str, TensorInfo]) -> Matrix:
        weight = tensors[".weight"]
        rows, cols = weight.shape if len(weight.shape) == 2 else (1, 1)
        block = {"tensor": (rows, cols), "channel": (1, cols)}.get(self.strategy, self.block)
        return Fp8BlockMatrix(weight, tensors[".weight_scale"], block or (1, 1))


def parse_compressed_tensors(config: Mapping[str, Any]) -> SuffixScheme:
    """Weights only: activations stay fp32 here, so dynamic activation quantisation needs nothing. Static activation or
    output scales, KV-cache scales, sparsity, several groups, and activation order are refused."""
    groups = config.get("config_groups")
    if not isinstance(groups, Mapping) or len(groups) != 1:
        count = len(groups) if isinstance(groups, Mapping) else "no"
        raise UnsupportedError(f"{_METHOD} quantisation with {count} config_groups is not implemented; exactly one is")
    (group,) = groups.values()
    weights = group.get("weights") if isinstance(group, Mapping) else None
    if not isinstance(weights, Mapping):
        raise CheckpointError(f"{_METHOD} quantisation: the config group describes no weights")
    unset(_METHOD, config, "kv_cache_scheme", "transform_config")
    unset(_METHOD, group, "output_activations")
    unset(_METHOD, weights, "dynamic")
    sparsity = config.get("sparsity_config") or {}
    only(_METHOD, sparsity, "format", ("dense",), "dense")
    activations = group.get("input_activations")
    if activations and activations.get("dynamic") is not True:
        raise UnsupportedError(f"{_METHOD} quantisation with static input_activations is not implemented")
    layout = group.get("format") or config.get("format")
    if layout == "pack-quantized":
        return _packed(weights)
    if layout in ("int-quantized", "float-quantized", "naive-quantized"):
        return _unpacked(weights)
    raise UnsupportedError(
        f"{_METHOD} quantisation with format = {layout!r} is not implemented; pack-quantized, int-quantized and "
        "float-quantized are"
    )


def _packed(weights: Mapping[str, Any]) -> PackedScheme:
    only(_METHOD, weights, "type", ("int",), None)
    bits = only(_METHOD, weights, "num_bits", (4, 8), None)
    strategy = only(_METHOD, weights, "strategy", ("group", "channel"), None)
    only(_METHOD, weights, "actorder", (None, False, "weight", "static"), None)
    symmetric = only(_METHOD, weights, "symmetric", (True, False), None)
    group = group_size(_METHOD, weights.get("group_size")) if strategy == "group" else None
    return PackedScheme(bits, group, symmetric)


def _unpacked(weights: Mapping[str, Any]) -> SuffixScheme:
    only(_METHOD, weights, "num_bits", (8,), None)
    only(_METHOD, weights, "symmetric", (True,), None)
    if only(_METHOD, weights, "type", ("int", "float"), None) == "int":
        only(_METHOD, weights, "strategy", ("channel",), None)
        return Int8Scheme()
    strategy = only(_METHOD, weights, "strategy", ("tensor", "channel", "block"), None)
    block = weights.get("block_structure")
    if strategy != "block":
        return FloatScheme(strategy, None)
    if not isinstance(block, list | tuple) or len(block) != 2 or not all(type(n) is int and n > 0 for n in block):
        raise CheckpointError(f"{_METHOD} quantisation: block_structure is {block!r}, not two positive numbers")
    return FloatScheme(strategy, (block[0], block[1]))
