"""Tiny random checkpoints in the quantised layouts of the hub, packed here by the published layouts' rules.

    model = tiny_quantised("qwen3_moe", "fp8", tmp_path)

Projections of attention, FFNs and experts are quantised; embeddings, head, norms, routers and biases are not. The
returned transformers model holds the dequantised weights and is the truth.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from tiny_models import change_json, tiny_checkpoint, write_safetensors

GROUP = 32  # columns per scale of the integer formats
FP8_BLOCK = (24, 16)  # rows and columns per scale; neither divides every weight

_SIZES: dict[str, Any] = {"hidden_size": 96, "intermediate_size": 64, "num_hidden_layers": 2}
_MOE_SIZES: dict[str, Any] = {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 64}
_CONFIGS: dict[str, dict[str, Any]] = {
    "fp8": {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": list(FP8_BLOCK),
    },
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": False},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"},
    "compressed": {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {
                    "num_bits": 4,
                    "type": "int",
                    "symmetric": True,
                    "strategy": "group",
                    "group_size": GROUP,
                },
            }
        },
    },
    "mxfp4": {"quant_method": "mxfp4"},
}

Tensors = dict[str, torch.Tensor]
Packed = tuple[Tensors, torch.Tensor]  # stored tensors by suffix, and the dequantised weight


def _fp8(weight: torch.Tensor) -> Packed:
    rows, cols = weight.shape
    block_rows, block_cols = FP8_BLOCK
    grid = torch.zeros(-(-rows // block_rows), -(-cols // block_cols))
    for row in range(grid.shape[0]):
        for col in range(grid.shape[1]):
            block = weight[row * block_rows : (row + 1) * block_rows, col * block_cols : (col + 1) * block_cols]
            grid[row, col] = block.abs().max() / 448
    spread = grid.repeat_interleave(block_rows, 0)[:rows].repeat_interleave(block_cols, 1)[:, :cols]
    codes = (weight / spread).to(torch.float8_e4m3fn)
    return {".weight": codes, ".weight_scale_inv": grid}, codes.float() * spread


def _int4(weight: torch.Tensor, symmetric: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes 0..15 [rows, cols], scales fp16 and zero points [rows, groups]; w = (code - zero) * scale."""
    groups = weight.view(weight.shape[0], -1, GROUP)
    if symmetric:
        scales = (groups.abs().amax(-1) / 7).half()
        zeros = torch.full(scales.shape, 8)
    else:
        low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
        scales = ((high - low) / 15).half()
        zeros = (-low / scales.float()).round().clamp(0, 15).long()
    codes = (groups / scales.float()[..., None] + zeros[..., None]).round().clamp(0, 15).long()
    return codes.view(weight.shape), scales, zeros


def _dense(codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor) -> torch.Tensor:
    per_column = [part.repeat_interleave(GROUP, 1) for part in (scales.float(), zeros)]
    return (codes - per_column[1]).float() * per_column[0]


def _pack(nibbles: torch.Tensor, order: tuple[int, ...] = tuple(range(8))) -> torch.Tensor:
    """Eight codes of a row per int32; place ``k`` (4 bits each, from the lowest) holds code ``order[k]``."""
    grouped = nibbles.view(nibbles.shape[0], -1, 8)[..., list(order)]
    packed = (grouped << (4 * torch.arange(8))).sum(-1)
    return torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32)


def _gptq(weight: torch.Tensor) -> Packed:
    codes, scales, zeros = _int4(weight, symmetric=False)
    zeros = zeros.clamp(min=1)  # stored less one
    stored = {
        ".qweight": _pack(codes).t(),  # [cols / 8, rows]: packed along the inputs
        ".qzeros": _pack((zeros - 1).t().contiguous()),  # [groups, rows / 8]
        ".scales": scales.t(),
        ".g_idx": torch.arange(weight.shape[1], dtype=torch.int32) // GROUP,
    }
    return stored, _dense(codes, scales, zeros)


def _awq(weight: torch.Tensor) -> Packed:
    codes, scales, zeros = _int4(weight, symmetric=False)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    stored = {
        ".qweight": _pack(codes.t().contiguous(), order),  # [cols, rows / 8]: packed along the outputs
        ".qzeros": _pack(zeros.t().contiguous(), order),
        ".scales": scales.t(),
    }
    return stored, _dense(codes, scales, zeros)


def _compressed(weight: torch.Tensor) -> Packed:
    codes, scales, zeros = _int4(weight, symmetric=True)
    stored = {
        ".weight_packed": _pack(codes),
        ".weight_scale": scales,
        ".weight_shape": torch.tensor(weight.shape),
    }
    return stored, _dense(codes, scales, zeros)


_PACKERS: dict[str, Callable[[torch.Tensor], Packed]] = {
    "fp8": _fp8,
    "gptq": _gptq,
    "awq": _awq,
    "compressed": _compressed,
}


def _mxfp4(stack: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """[E, rows, cols] as blocks uint8 [E, rows, cols / 32, 16], exponents uint8 [E, rows, cols / 32], and dense."""
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    blocks = stack.view(*stack.shape[:2], -1, 32)
    exponents = (blocks.abs().amax(-1) / 6).log2().ceil().clamp(min=-126)
    scaled = blocks / exponents.exp2()[..., None]
    codes = (scaled.abs()[..., None] - values).abs().argmin(-1)
    signed = values[codes] * torch.where(scaled < 0, -1.0, 1.0)
    nibbles = codes + 8 * (scaled < 0)
    packed = nibbles[..., 0::2] | (nibbles[..., 1::2] << 4)
    dense = (signed * exponents.exp2()[..., None]).view(stack.shape)
    return packed.to(torch.uint8), (exponents + 127).to(torch.uint8), dense


def _is_projection(name: str, tensor: torch.Tensor) -> bool:
    if not name.endswith(".weight") or tensor.dim() != 2 or ".layers." not in name:
        return False
    return not any(part in name for part in ("norm", ".gate.", "router", "shared_expert_gate"))


def _quantise(tensors: Tensors, scheme: str) -> tuple[Tensors, Tensors]:
    """Stored tensors, and the same checkpoint dequantised."""
    stored, dense = {}, {}
    for name, tensor in tensors.items():
        if scheme == "mxfp4" and name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            blocks, exponents, values = _mxfp4(tensor.transpose(1, 2).contiguous())
            stored[f"{name}_blocks"], stored[f"{name}_scales"] = blocks, exponents
            dense[name] = values.transpose(1, 2)
        elif scheme != "mxfp4" and _is_projection(name, tensor):
            parts, dense[name] = _PACKERS[scheme](tensor)
            module = name.removesuffix(".weight")
            stored |= {module + suffix: part for suffix, part in parts.items()}
        else:
            stored[name] = dense[name] = tensor
    return stored, dense


def tiny_quantised(
    family: str,
    scheme: str,
    path: Path,
    *,
    edit: Callable[[Tensors], Any] = lambda tensors: None,
    quantization: dict[str, Any] | None = None,
    **overrides: Any,
) -> Any:
    """Write a checkpoint in ``scheme`` ("fp8", "gptq", "awq", "compressed", "mxfp4") and return its model.

    ``edit`` may change the stored tensors; ``quantization`` changes keys of quantization_config.
    """
    from transformers import AutoModelForCausalLM

    moe = _MOE_SIZES if family in ("qwen2_moe", "qwen3_moe", "deepseek_v3", "glm4_moe") else {}
    plain = path / "plain"
    tiny_checkpoint(family, plain, **{**_SIZES, **moe, **overrides})
    stored, dense = _quantise(load_file(plain / "model.safetensors"), scheme)
    write_safetensors(plain, {name: tensor.contiguous() for name, tensor in dense.items()})
    model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32, attn_implementation="eager").eval()
    edit(stored)
    write_safetensors(path, {name: tensor.contiguous() for name, tensor in stored.items()})
    (path / "config.json").write_text((plain / "config.json").read_text())
    change_json(path / "config.json", {"quantization_config": {**_CONFIGS[scheme], **(quantization or {})}})
    return model
