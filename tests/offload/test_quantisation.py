"""Which scheme a configuration names, which tensors a module takes, and what is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from matrix_checks import StoredBytes

from batchgen_lite.errors import CheckpointError, UnsupportedError
from batchgen_lite.offload.checkpoint.awq_matrix import AwqMatrix
from batchgen_lite.offload.checkpoint.fp8_matrix import Fp8BlockMatrix
from batchgen_lite.offload.checkpoint.gptq_matrix import GptqMatrix
from batchgen_lite.offload.checkpoint.matrices import TensorMatrix, read_dense
from batchgen_lite.offload.checkpoint.mxfp4_matrix import Mxfp4Matrix
from batchgen_lite.offload.checkpoint.packed_int_matrix import Int8Matrix, PackedIntMatrix
from batchgen_lite.offload.checkpoint.quantisation import parse_scheme, quantised_matrix
from batchgen_lite.offload.checkpoint.tensors import Checkpoint

# As found in the config.json of published models.
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [16, 16]}
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
GPTQ: dict[str, Any] = {
    "quant_method": "gptq",
    "bits": 4,
    "group_size": 16,
    "desc_act": False,
    "sym": True,
    "true_sequential": True,
    "checkpoint_format": "gptq",
}
AWQ: dict[str, Any] = {
    "quant_method": "awq",
    "bits": 4,
    "group_size": 16,
    "zero_point": True,
    "version": "gemm",
    "modules_to_not_convert": None,
}


def compressed(weights: dict[str, Any], layout: str = "pack-quantized", **more: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
        **more,
    }


W4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 16, "dynamic": False}
W4A = {**W4, "symmetric": False}
W8 = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "group_size": None}
F8 = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel", "dynamic": False}


def make(tmp_path: Path, **tensors: torch.Tensor) -> Checkpoint:
    """A checkpoint of tensors whose names are given with "__" for "."."""
    stored = StoredBytes()
    infos = [stored.add_tensor(name.replace("__", "."), tensor) for name, tensor in tensors.items()]
    return stored.checkpoint(tmp_path / "w", infos)


def zeros(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


I32, HALF, E4M3, U8 = torch.int32, torch.float16, torch.float8_e4m3fn, torch.uint8
INT4_TENSORS = {"m__qweight": zeros(I32, 4, 8), "m__qzeros": zeros(I32, 2, 1), "m__scales": zeros(HALF, 2, 8)}
AWQ_TENSORS = {"m__qweight": zeros(I32, 32, 1), "m__qzeros": zeros(I32, 2, 1), "m__scales": zeros(HALF, 2, 8)}
FP8_TENSORS = {"m__weight": zeros(E4M3, 32, 20), "m__weight_scale_inv": torch.ones(2, 2)}
W4_TENSORS = {
    "m__weight_packed": zeros(I32, 8, 4),
    "m__weight_scale": zeros(HALF, 8, 2),
    "m__weight_shape": torch.tensor([8, 32]),
}


@pytest.mark.parametrize(
    ("config", "tensors", "kind", "encoding"),
    [
        (FP8, FP8_TENSORS, Fp8BlockMatrix, "F8_E4M3"),
        ({**FP8, "scale_fmt": "ue8m0"}, FP8_TENSORS, Fp8BlockMatrix, "F8_E4M3"),
        (
            {**FP8, "weight_block_size": None},
            {"m__weight": zeros(E4M3, 4, 4), "m__weight_scale_inv": torch.tensor(0.5)},
            Fp8BlockMatrix,
            "F8_E4M3",
        ),
        (MXFP4, {"m_blocks": zeros(U8, 8, 2, 16), "m_scales": zeros(U8, 8, 2)}, Mxfp4Matrix, "MXFP4_BLOCKS"),
        (GPTQ, INT4_TENSORS, GptqMatrix, "GPTQ_INT4"),
        (GPTQ, {**INT4_TENSORS, "m__g_idx": zeros(I32, 32)}, GptqMatrix, "GPTQ_INT4"),
        (AWQ, AWQ_TENSORS, AwqMatrix, "AWQ_INT4"),
        (compressed(W4), W4_TENSORS, PackedIntMatrix, "INT4"),
        (compressed(W4A), {**W4_TENSORS, "m__weight_zero_point": zeros(I32, 1, 2)}, PackedIntMatrix, "INT4"),
        (
            compressed(W8, "int-quantized"),
            {"m__weight": zeros(torch.int8, 8, 5), "m__weight_scale": zeros(HALF, 8, 1)},
            Int8Matrix,
            "INT8",
        ),
        (
            compressed(F8, "float-quantized"),
            {"m__weight": zeros(E4M3, 8, 5), "m__weight_scale": torch.ones(8, 1)},
            Fp8BlockMatrix,
            "F8_E4M3",
        ),
    ],
)
def test_schemes_find_their_tensors(
    tmp_path: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor], kind: type, encoding: str
) -> None:
    checkpoint = make(tmp_path, **tensors)
    scheme = parse_scheme(config)
    assert scheme.method == config["quant_method"]
    assert set(scheme.tensor_names(checkpoint, "m")) == set(checkpoint.tensors)  # none is left over
    matrix = scheme.matrix(checkpoint, "m")
    assert isinstance(matrix, kind)
    assert matrix.encoding == encoding
    assert read_dense(checkpoint, matrix).shape == (matrix.rows, matrix.cols)
    assert isinstance(quantised_matrix(checkpoint, "m.weight", config), kind)


ALL = [FP8, MXFP4, GPTQ, AWQ, compressed(W4), compressed(W8, "int-quantized"), compressed(F8, "float-quantized")]


@pytest.mark.parametrize("config", ALL, ids=lambda config: config.get("format", config["quant_method"]))
def test_modules_that_are_not_quantised(tmp_path: Path, config: dict[str, Any]) -> None:
    plain = torch.randn(3, 4).bfloat16()
    checkpoint = make(tmp_path, m__weight=plain, experts=torch.stack([plain, -plain]))
    scheme = parse_scheme(config)
    assert scheme.tensor_names(checkpoint, "m") == ("m.weight",)
    assert isinstance(scheme.matrix(checkpoint, "m"), TensorMatrix)
    assert torch.equal(read_dense(checkpoint, scheme.matrix(checkpoint, "experts", 1)), -plain.float())
    assert scheme.tensor_names(checkpoint, "absent") == ()
    with pytest.raises(CheckpointError, match="module 'absent' has no weight"):
        scheme.matrix(checkpoint, "absent")


def test_stacked_experts(tmp_path: Path) -> None:
    weight = torch.randn(3, 32, 20, generator=torch.Generator().manual_seed(0)).to(E4M3)
    scale = torch.rand(3, 2, 2)
    checkpoint = make(tmp_path, experts__up=weight, experts__up_scale_inv=scale)
    scheme = parse_scheme(FP8)
    assert scheme.tensor_names(checkpoint, "experts.up") == ("experts.up", "experts.up_scale_inv")
    for index in range(3):
        wide = scale[index].repeat_interleave(16, 0).repeat_interleave(16, 1)[:32, :20]
        found = read_dense(checkpoint, scheme.matrix(checkpoint, "experts.up", index))
        assert torch.equal(found, weight[index].float() * wide)


@pytest.mark.parametrize(
    ("config", "tensors", "gone", "message"),
    [
        (FP8, FP8_TENSORS, "m__weight_scale_inv", "'m.weight' is stored as F8_E4M3, but the scales"),
        (FP8, FP8_TENSORS, "m__weight", r"m\.weight_scale_inv is stored, but m\.weight is missing"),
        (GPTQ, INT4_TENSORS, "m__scales", r"m\.qweight is stored, but m\.scales is missing"),
        (GPTQ, INT4_TENSORS, "m__qweight", r"m\.qzeros is stored, but m\.qweight is missing"),
        (AWQ, AWQ_TENSORS, "m__qzeros", r"m\.qweight is stored, but m\.qzeros is missing"),
        (compressed(W4), W4_TENSORS, "m__weight_shape", r"m\.weight_packed is stored, but m\.weight_shape"),
        (compressed(W4A), W4_TENSORS, "", "asymmetric, but weight_zero_point disagrees"),
        (
            compressed(W4),
            {**W4_TENSORS, "m__weight_zero_point": zeros(I32, 1, 2)},
            "",
            "symmetric, but weight_zero_point disagrees",
        ),
        (compressed(W4), {**W4_TENSORS, "m__weight_shape": torch.tensor([9, 32])}, "", "weight_shape says 9 x 32"),
        (compressed(W4), {**W4_TENSORS, "m__weight_shape": torch.tensor([8, 40])}, "", "40 columns are not"),
        (compressed(W4), {**W4_TENSORS, "m__weight_shape": torch.tensor([8, 48])}, "", r"\[8, 6\] was expected"),
        ({**GPTQ, "desc_act": True}, INT4_TENSORS, "", "has no g_idx beside it"),
        (GPTQ, {"m__g_idx": zeros(I32, 32)}, "", r"m\.g_idx is stored without a weight"),
    ],
)
def test_incomplete_modules(
    tmp_path: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor], gone: str, message: str
) -> None:
    checkpoint = make(tmp_path, **{name: tensor for name, tensor in tensors.items() if name != gone})
    with pytest.raises(CheckpointError, match=message):
        quantised_matrix(checkpoint, "m", config)


def test_activation_order_of_compressed_tensors_is_refused_by_its_tensor(tmp_path: Path) -> None:
    checkpoint = make(tmp_path, **W4_TENSORS, m__weight_g_idx=zeros(I32, 32))
    with pytest.raises(UnsupportedError, match="weight_g_idx"):
        quantised_matrix(checkpoint, "m", compressed(W4))


@pytest.mark.parametrize("method", ["bitsandbytes", "aqlm", "hqq", "eetq", "fbgemm_fp8", "modelopt", "torchao"])
def test_unknown_methods_are_refused_by_name(method: str) -> None:
    with pytest.raises(UnsupportedError, match=f"quantisation '{method}' is not implemented; implemented: fp8, mxfp4"):
        parse_scheme({"quant_method": method})


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({**FP8, "fmt": "e5m2"}, "fmt = 'e5m2'"),
        ({**FP8, "activation_scheme": "static"}, "activation_scheme = 'static'"),
        ({**FP8, "expert_dtype": "fp4"}, "expert_dtype = 'fp4'"),
        ({**GPTQ, "bits": 3}, "bits = 3 is not implemented; only 4 is"),
        ({**GPTQ, "bits": 8}, "bits = 8"),
        ({**GPTQ, "bits": True}, "bits = True"),
        ({**GPTQ, "checkpoint_format": "marlin"}, "checkpoint_format = 'marlin'"),
        ({**GPTQ, "dynamic": {"-:lm_head": {}}}, "dynamic = "),
        ({**AWQ, "version": "gemv"}, "version = 'gemv' is not implemented; only 'gemm' is"),
        ({**AWQ, "version": None}, "version = None"),
        ({**AWQ, "zero_point": False}, "zero_point = False"),
        (compressed(W4, "marlin-24"), "format = 'marlin-24'"),
        (compressed(W4, "nvfp4-pack-quantized"), "format = 'nvfp4-pack-quantized'"),
        (compressed(W4, kv_cache_scheme={"num_bits": 8}), "kv_cache_scheme"),
        (compressed(W4, sparsity_config={"format": "sparse-24-bitmask"}), "format = 'sparse-24-bitmask'"),
        (compressed(W4, config_groups={"a": {}, "b": {}}), "with 2 config_groups"),
        (compressed({**W4, "actorder": "group"}), "actorder = 'group'"),
        (compressed({**W4, "num_bits": 2}), "num_bits = 2"),
        (compressed({**W4, "type": "float"}), "type = 'float'"),
        (compressed({**W4, "strategy": "tensor"}), "strategy = 'tensor'"),
        (compressed({**W4, "dynamic": True}), "dynamic = True"),
        (compressed({**W8, "symmetric": False}, "int-quantized"), "symmetric = False"),
        (compressed({**W8, "strategy": "tensor"}, "int-quantized"), "strategy = 'tensor'"),
        (compressed({**F8, "strategy": "token"}, "float-quantized"), "strategy = 'token'"),
    ],
)
def test_options_that_are_not_implemented_are_refused_by_name(config: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        parse_scheme(config)


def test_static_activation_scales_are_refused() -> None:
    config = compressed(W8, "int-quantized")
    config["config_groups"]["group_0"]["input_activations"] = {"num_bits": 8, "dynamic": True}
    parse_scheme(config)
    config["config_groups"]["group_0"]["input_activations"] = {"num_bits": 8, "dynamic": False}
    with pytest.raises(UnsupportedError, match="static input_activations"):
        parse_scheme(config)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "names no quant_method"),
        ({"quant_method": "fp8"}, "weight_block_size is not stated; a block size is never guessed"),
        ({**FP8, "weight_block_size": [128]}, r"weight_block_size is \[128\]"),
        ({**FP8, "weight_block_size": [0, 128]}, "not two positive numbers"),
        ({**GPTQ, "group_size": None}, "group_size is None, not a positive number or -1"),
        ({**GPTQ, "group_size": 0}, "group_size is 0"),
        ({**AWQ, "group_size": "128"}, "group_size is '128'"),
        (compressed({**W4, "group_size": None}), "group_size is None"),
        (compressed({**F8, "strategy": "block"}, "float-quantized"), "block_structure is None"),
        ({**compressed(W4), "config_groups": {"g": {}}}, "describes no weights"),
    ],
)
def test_incomplete_configurations(config: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        parse_scheme(config)


def test_one_group_a_row(tmp_path: Path) -> None:
    tensors = {**INT4_TENSORS, "m__qzeros": zeros(I32, 1, 1), "m__scales": zeros(HALF, 1, 8)}
    matrix = quantised_matrix(make(tmp_path, **tensors), "m", {**GPTQ, "group_size": -1})
    assert isinstance(matrix, GptqMatrix)
    assert matrix.groups == 1


def test_other_spellings_of_awq_options(tmp_path: Path) -> None:
    config = {"quant_method": "awq", "w_bit": 4, "q_group_size": 16, "version": "GEMM"}
    assert isinstance(quantised_matrix(make(tmp_path, **AWQ_TENSORS), "m", config), AwqMatrix)
