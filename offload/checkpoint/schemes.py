"""The schemes fp8 (DeepSeek, Qwen), mxfp4 (gpt-oss), gptq and awq, as ``quantization_config`` describes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from batchgen_lite.errors import CheckpointError, UnsupportedError
from batchgen_lite.offload.checkpoint.awq_matrix import AwqMatrix
from batchgen_lite.offload.checkpoint.fp8_matrix import Fp8BlockMatrix
from batchgen_lite.offload.checkpoint.gptq_matrix import GptqMatrix
from batchgen_lite.offload.checkpoint.matrix import Matrix
from batchgen_lite.offload.checkpoint.mxfp4_matrix import Mxfp4Matrix
from batchgen_lite.offload.checkpoint.scheme_settings import SuffixScheme, group_size, only, unset
from batchgen_lite.offload.checkpoint.tensors import Checkpoint, TensorInfo

Tensors = Mapping[str, TensorInfo]


@dataclass(frozen=True)
class Fp8Scheme(SuffixScheme):
    """``block``: rows and columns per scale; None: one scale for the whole tensor, stated as a null block size."""

    block: tuple[int, int] | None
    method: ClassVar[str] = "fp8"
    # the second: experts stacked into one tensor
    layouts: ClassVar[tuple[tuple[str, ...], ...]] = ((".weight", ".weight_scale_inv"), ("", "_scale_inv"))
    shares_weight_name: ClassVar[bool] = True

    def build(self, checkpoint: Checkpoint, tensors: Tensors) -> Matrix:
        weight, scale = tensors.values()
        if self.block is None and len(weight.shape) == 2:
            return Fp8BlockMatrix(weight, scale, (weight.shape[0], weight.shape[1]))
        return Fp8BlockMatrix(weight, scale, self.block or (1, 1))


def parse_fp8(config: Mapping[str, Any]) -> Fp8Scheme:
    """Activations stay fp32 here, so a dynamic activation scheme needs nothing; a static one stores scales of its own
    and is refused."""
    only("fp8", config, "fmt", ("e4m3",), "e4m3")
    only("fp8", config, "activation_scheme", ("dynamic",), "dynamic")
    only("fp8", config, "scale_fmt", ("float", "ue8m0"), "float")
    only("fp8", config, "expert_dtype", ("fp8",), "fp8")
    if "weight_block_size" not in config:
        raise CheckpointError("fp8 quantisation: weight_block_size is not stated; a block size is never guessed")
    block = config["weight_block_size"]
    if block is None:
        return Fp8Scheme(None)
    if not isinstance(block, list | tuple) or len(block) != 2 or not all(type(n) is int and n > 0 for n in block):
        raise CheckpointError(f"fp8 quantisation: weight_block_size is {block!r}, not two positive numbers")
    return Fp8Scheme((block[0], block[1]))


@dataclass(frozen=True)
class Mxfp4Scheme(SuffixScheme):
    """gpt-oss: expert weights as blocks and exponents; everything else plain."""

    method: ClassVar[str] = "mxfp4"
    layouts: ClassVar[tuple[tuple[str, ...], ...]] = (("_blocks", "_scales"),)

    def build(self, checkpoint: Checkpoint, tensors: Tensors) -> Matrix:
        return Mxfp4Matrix(tensors["_blocks"], tensors["_scales"])


def parse_mxfp4(config: Mapping[str, Any]) -> Mxfp4Scheme:
    """Nothing but the method is stated; the format fixes the rest."""
    return Mxfp4Scheme()


@dataclass(frozen=True)
class GptqScheme(SuffixScheme):
    """``group`` None: one group a row."""

    group: int | None
    zero_offset: int
    desc_act: bool
    method: ClassVar[str] = "gptq"
    layouts: ClassVar[tuple[tuple[str, ...], ...]] = ((".qweight", ".qzeros", ".scales"),)
    optional: ClassVar[tuple[str, ...]] = (".g_idx",)

    def build(self, checkpoint: Checkpoint, tensors: Tensors) -> Matrix:
        qweight = tensors[".qweight"]
        g_idx = tensors.get(".g_idx")
        if self.desc_act and g_idx is None:
            raise CheckpointError(f"gptq quantisation with desc_act: {qweight.name!r} has no g_idx beside it")
        group = self.group or 8 * qweight.shape[0]
        return GptqMatrix(qweight, tensors[".qzeros"], tensors[".scales"], g_idx, group, self.zero_offset)


def parse_gptq(config: Mapping[str, Any]) -> GptqScheme:
    """Symmetric or not makes no difference to the layout: zero points are stored either way."""
    only("gptq", config, "bits", (4,), None)
    unset("gptq", config, "dynamic", "adapter")
    only("gptq", config, "pack_dtype", ("int32",), "int32")
    key = "checkpoint_format" if "checkpoint_format" in config else "format"
    layout = only("gptq", config, key, ("gptq", "gptq_v2"), "gptq")
    desc_act = only("gptq", config, "desc_act", (True, False), False)
    return GptqScheme(group_size("gptq", config.get("group_size")), 1 if layout == "gptq" else 0, desc_act)


@dataclass(frozen=True)
class AwqScheme(SuffixScheme):
    """``group`` None: one group a row."""

    group: int | None
    method: ClassVar[str] = "awq"
    layouts: ClassVar[tuple[tuple[str, ...], ...]] = ((".qweight", ".qzeros", ".scales"),)

    def build(self, checkpoint: Checkpoint, tensors: Tensors) -> Matrix:
        qweight = tensors[".qweight"]
        return AwqMatrix(qweight, tensors[".qzeros"], tensors[".scales"], self.group or qweight.shape[0])


def parse_awq(config: Mapping[str, Any]) -> AwqScheme:
    """Both spellings of AutoAWQ and transformers are read: bits/w_bit, group_size/q_group_size, version/format."""
    only("awq", config, "bits" if "bits" in config else "w_bit", (4,), None)
    only("awq", config, "zero_point", (True,), True)
    unset("awq", config, "dynamic")
    stated = config.get("version", config.get("format"))
    if not isinstance(stated, str) or stated.lower() != "gemm":
        raise UnsupportedError(f"awq quantisation with version = {stated!r} is not implemented; only 'gemm' is")
    return AwqScheme(group_size("awq", config.get("group_size", config.get("q_group_size"))))
