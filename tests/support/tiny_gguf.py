"""Tiny random GGUF files, laid out as llama.cpp's converter does, from the transformers models of tiny_models.

    model = tiny_gguf("llama", tmp_path / "tiny.gguf", encoding="Q8_0")

Encoded weights are decoded by the gguf package and put back into the returned model, which so stays the truth.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy
import torch
from tiny_models import tiny_model

ARCHITECTURES = {
    "llama": "llama",
    "llama3": "llama",
    "mistral": "llama",
    "mixtral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    "olmoe": "olmoe",
    "gpt_oss": "gpt-oss",
    "deepseek_v2": "deepseek2",
    "deepseek_v2_lite": "deepseek2",
    "deepseek_v3": "deepseek2",
}

# Row lengths must be multiples of the 32 elements of a block; what the files cannot express is switched off.
_BLOCK_SIZES: dict[str, Any] = {"hidden_size": 96, "intermediate_size": 64, "moe_intermediate_size": 32}
_WIDE_HEADS: dict[str, Any] = {"head_dim": 32}
_OVERRIDES: dict[str, dict[str, Any]] = {
    "llama": _WIDE_HEADS,
    "llama3": _WIDE_HEADS,
    "mistral": {**_WIDE_HEADS, "sliding_window": None},
    "mixtral": _WIDE_HEADS,
    "qwen3": _WIDE_HEADS,
    "qwen3_moe": _WIDE_HEADS,
    "gpt_oss": _WIDE_HEADS,
    "qwen2": {"use_sliding_window": False},
    "qwen2_moe": {"mlp_only_layers": [], "shared_expert_intermediate_size": 64},
    "deepseek_v2": {"kv_lora_rank": 32, "q_lora_rank": 32, "qk_nope_head_dim": 32, "v_head_dim": 32},
    "deepseek_v2_lite": {"kv_lora_rank": 32, "qk_nope_head_dim": 32, "v_head_dim": 32},
    "deepseek_v3": {"kv_lora_rank": 32, "q_lora_rank": 32, "qk_nope_head_dim": 32, "v_head_dim": 32},
}
# DeepSeek's own two mscale values are equal, which llama.cpp's single key relies on.
_EQUAL_MSCALE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "mscale": 0.75,
    "mscale_all_dim": 0.75,
    "original_max_position_embeddings": 64,
}


# Byte offsets of the fp16 scales in a block of the types that the gguf package cannot encode (ggml-common.h).
_SCALE_FIELDS = {
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ4_NL": (0,),
}


@dataclass
class _Tensors:
    """What goes into the file: name -> (a view of the model's parameter, the shape stored)."""

    config: Any
    state: dict[str, torch.Tensor]
    stored: dict[str, tuple[torch.Tensor, tuple[int, ...]]] = field(default_factory=dict)

    def add(self, name: str, view: torch.Tensor, shape: tuple[int, ...] | None = None) -> None:
        self.stored[name] = (view, tuple(view.shape) if shape is None else shape)

    def add_if(self, name: str, key: str) -> None:
        if key in self.state:
            self.add(name, self.state[key])

    def attention(self, block: str, layer: str, permuted: bool) -> None:
        for ours, theirs in (
            ("attn_q", "q_proj"),
            ("attn_k", "k_proj"),
            ("attn_v", "v_proj"),
            ("attn_output", "o_proj"),
        ):
            for kind in ("weight", "bias"):
                key = f"{layer}self_attn.{theirs}.{kind}"
                if key not in self.state:
                    continue
                tensor = self.state[key]
                if permuted and ours in ("attn_q", "attn_k"):
                    rows, rest = tensor.shape[0], tuple(tensor.shape[1:])
                    pairs = tensor.view(-1, 2, self.config.head_dim // 2, *rest).transpose(1, 2)
                    self.add(f"{block}{ours}.{kind}", pairs, (rows, *rest))
                else:
                    self.add(f"{block}{ours}.{kind}", tensor)
        self.add_if(f"{block}attn_q_norm.weight", f"{layer}self_attn.q_norm.weight")
        self.add_if(f"{block}attn_k_norm.weight", f"{layer}self_attn.k_norm.weight")
        self.add_if(f"{block}attn_sinks.weight", f"{layer}self_attn.sinks")

    def latent_attention(self, block: str, layer: str, split: bool) -> None:
        names = {"q_proj": "attn_q", "q_a_proj": "attn_q_a", "q_b_proj": "attn_q_b", "o_proj": "attn_output"}
        names |= {"kv_a_proj_with_mqa": "attn_kv_a_mqa", "q_a_layernorm": "attn_q_a_norm"}
        names |= {"kv_a_layernorm": "attn_kv_a_norm"}
        for theirs, ours in names.items():
            self.add_if(f"{block}{ours}.weight", f"{layer}self_attn.{theirs}.weight")
        kv_b = self.state[f"{layer}self_attn.kv_b_proj.weight"]
        if not split:
            self.add(f"{block}attn_kv_b.weight", kv_b)
            return
        nope = self.config.qk_nope_head_dim
        heads = kv_b.view(self.config.num_attention_heads, nope + self.config.v_head_dim, -1)
        self.add(f"{block}attn_k_b.weight", heads[:, :nope].transpose(1, 2))
        self.add(f"{block}attn_v_b.weight", heads[:, nope:])

    def feed_forward(self, block: str, layer: str) -> None:
        for ours, theirs in (("ffn_gate", "gate_proj"), ("ffn_up", "up_proj"), ("ffn_down", "down_proj")):
            self.add_if(f"{block}{ours}.weight", f"{layer}mlp.{theirs}.weight")
            self.add_if(f"{block}{ours}_shexp.weight", f"{layer}mlp.shared_expert.{theirs}.weight")
            self.add_if(f"{block}{ours}_shexp.weight", f"{layer}mlp.shared_experts.{theirs}.weight")
        if f"{layer}mlp.shared_expert_gate.weight" in self.state:
            self.add(f"{block}ffn_gate_inp_shexp.weight", self.state[f"{layer}mlp.shared_expert_gate.weight"][0])
        for router in ("gate", "router"):
            self.add_if(f"{block}ffn_gate_inp.weight", f"{layer}mlp.{router}.weight")
            self.add_if(f"{block}ffn_gate_inp.bias", f"{layer}mlp.{router}.bias")
        self.add_if(f"{block}exp_probs_b.bias", f"{layer}mlp.gate.e_score_correction_bias")
        if f"{layer}mlp.experts.gate_up_proj" in self.state:
            self._experts(block, f"{layer}mlp.experts.")

    def _experts(self, block: str, prefix: str) -> None:
        gate_up, down = self.state[f"{prefix}gate_up_proj"], self.state[f"{prefix}down_proj"]
        if self.config.model_type != "gpt_oss":
            width = gate_up.shape[1] // 2
            self.add(f"{block}ffn_gate_exps.weight", gate_up[:, :width])
            self.add(f"{block}ffn_up_exps.weight", gate_up[:, width:])
            self.add(f"{block}ffn_down_exps.weight", down)
            return
        bias = self.state[f"{prefix}gate_up_proj_bias"]
        for half, name in enumerate(("gate", "up")):
            self.add(f"{block}ffn_{name}_exps.weight", gate_up[:, :, half::2].transpose(1, 2))
            self.add(f"{block}ffn_{name}_exps.bias", bias[:, half::2])
        self.add(f"{block}ffn_down_exps.weight", down.transpose(1, 2))
        self.add(f"{block}ffn_down_exps.bias", self.state[f"{prefix}down_proj_bias"])


def _collect(model: Any, architecture: str, split_kv_b: bool) -> _Tensors:
    tensors = _Tensors(model.config, model.state_dict())
    tensors.add("token_embd.weight", tensors.state["model.embed_tokens.weight"])
    tensors.add("output_norm.weight", tensors.state["model.norm.weight"])
    if not model.config.tie_word_embeddings:
        tensors.add("output.weight", tensors.state["lm_head.weight"])
    for index in range(model.config.num_hidden_layers):
        block, layer = f"blk.{index}.", f"model.layers.{index}."
        tensors.add(f"{block}attn_norm.weight", tensors.state[f"{layer}input_layernorm.weight"])
        norm = "post_attention_norm" if architecture == "gpt-oss" else "ffn_norm"
        tensors.add(f"{block}{norm}.weight", tensors.state[f"{layer}post_attention_layernorm.weight"])
        if architecture == "deepseek2":
            tensors.latent_attention(block, layer, split_kv_b)
        else:
            tensors.attention(block, layer, permuted=architecture == "llama")
        tensors.feed_forward(block, layer)
    return tensors


def _metadata(model: Any, split_kv_b: bool) -> dict[str, Any]:
    """The architecture's keys, as llama.cpp's converter derives them from config.json."""
    config = model.config
    rope = config.rope_parameters
    keys: dict[str, Any] = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "rope.freq_base": float(rope["rope_theta"]),
    }
    if config.model_type.startswith("deepseek"):
        keys |= _deepseek_metadata(config, split_kv_b)
    else:
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        keys |= {"attention.key_length": head_dim, "attention.value_length": head_dim, "rope.dimension_count": head_dim}
    if rope["rope_type"] == "yarn":
        keys |= {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": float(rope["factor"]),
            "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
        }
        if rope.get("mscale_all_dim"):
            keys["rope.scaling.yarn_log_multiplier"] = 0.1 * rope["mscale_all_dim"]
    experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
    if experts:
        keys |= {"expert_count": experts, "expert_used_count": config.num_experts_per_tok}
        if getattr(config, "moe_intermediate_size", None):
            keys["expert_feed_forward_length"] = config.moe_intermediate_size
    if config.model_type == "qwen2_moe":
        keys["expert_shared_feed_forward_length"] = config.shared_expert_intermediate_size
    if config.model_type == "gpt_oss":
        keys |= {
            "attention.sliding_window": config.sliding_window,
            "expert_feed_forward_length": config.intermediate_size,
        }
    return keys


def _deepseek_metadata(config: Any, split_kv_b: bool) -> dict[str, Any]:
    key, value = config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim
    keys: dict[str, Any] = {
        "attention.kv_lora_rank": config.kv_lora_rank,
        "rope.dimension_count": config.qk_rope_head_dim,
        "leading_dense_block_count": config.first_k_dense_replace,
        "expert_shared_count": config.n_shared_experts,
        "expert_weights_scale": float(config.routed_scaling_factor),
        "expert_weights_norm": bool(config.norm_topk_prob),
        "expert_gating_func": 2 if config.model_type == "deepseek_v3" else 1,
        "expert_group_count": config.n_group,
        "expert_group_used_count": config.topk_group,
    }
    if config.q_lora_rank:
        keys["attention.q_lora_rank"] = config.q_lora_rank
    if split_kv_b:
        keys |= {"attention.head_count_kv": 1, "attention.key_length": config.kv_lora_rank + config.qk_rope_head_dim}
        keys |= {"attention.value_length": config.kv_lora_rank}
        keys |= {"attention.key_length_mla": key, "attention.value_length_mla": value}
    else:
        keys |= {"attention.key_length": key, "attention.value_length": value}
    return keys


def tiny_gguf(
    family: str,
    path: Path,
    *,
    encoding: str = "F32",
    expert_encoding: str | None = None,
    seed: int = 0,
    split_kv_b: bool = True,
    metadata: dict[str, Any] | None = None,
    **overrides: Any,
) -> Any:
    """Write ``path`` and return its transformers model. Matrices are stored as ``encoding`` (stacked experts as
    ``expert_encoding``); norms, biases, routers and sinks as F32, as llama.cpp keeps them. ``metadata``: further
    full keys, or a key to leave out where the value is ``...``."""
    fields = {**_BLOCK_SIZES, **_OVERRIDES.get(family, {}), **overrides}
    if family in ("deepseek_v2", "deepseek_v3"):
        fields.setdefault("rope_parameters", dict(_EQUAL_MSCALE))
    architecture = ARCHITECTURES[family]
    if family not in ("qwen2_moe", "qwen3_moe") and "deepseek" not in family:
        fields.pop("moe_intermediate_size")
    model = tiny_model(family, seed=seed, **fields)
    keys = {f"{architecture}.{key}": value for key, value in _metadata(model, split_kv_b).items()}
    keys |= {"tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.bos_token_id": 1, **(metadata or {})}
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in keys.items():
        _add_key(writer, key, value)
    with torch.no_grad():
        for name, (view, shape) in _collect(model, architecture, split_kv_b).stored.items():
            wanted = expert_encoding if expert_encoding and "_exps." in name else encoding
            _add_tensor(writer, name, view, shape, wanted if _encoded(name, shape) else "F32")
        _add_frequency_factors(writer, model)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def _encoded(name: str, shape: tuple[int, ...]) -> bool:
    return len(shape) > 1 and not name.endswith(".bias") and "ffn_gate_inp" not in name


def _add_key(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if value is ...:
        return
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def _add_tensor(writer: gguf.GGUFWriter, name: str, view: torch.Tensor, shape: tuple[int, ...], encoding: str) -> None:
    kind = gguf.GGMLQuantizationType[encoding]
    if encoding in _SCALE_FIELDS:
        packed = _random_blocks(shape, kind, _SCALE_FIELDS[encoding])
    else:
        packed = gguf.quants.quantize(numpy.ascontiguousarray(view.reshape(shape).numpy()), kind)
    writer.add_tensor(name, packed, raw_dtype=kind)
    view.copy_(torch.from_numpy(gguf.quants.dequantize(packed, kind).astype(numpy.float32)).reshape(view.shape))


def _random_blocks(shape: tuple[int, ...], kind: gguf.GGMLQuantizationType, fields: tuple[int, ...]) -> Any:
    """Random codes with scales of about 1e-3, for the types that the gguf package can only decode."""
    block, nbytes = gguf.GGML_QUANT_SIZES[kind]
    generator = numpy.random.default_rng(shape)
    count = math.prod(shape) // block
    raw = generator.integers(0, 256, (count, nbytes), dtype=numpy.uint8)
    for offset in fields:
        scale = generator.uniform(5e-4, 2e-3, count).astype(numpy.float16)
        raw[:, offset : offset + 2] = scale.view(numpy.uint8).reshape(count, 2)
    return raw.reshape(*shape[:-1], -1)


def _add_frequency_factors(writer: gguf.GGUFWriter, model: Any) -> None:
    """Llama 3's rope scaling: the plain inverse frequencies divided by the scaled ones."""
    rope = model.config.rope_parameters
    if rope["rope_type"] != "llama3":
        return
    dim = model.config.head_dim
    plain = 1.0 / rope["rope_theta"] ** (torch.arange(0, dim, 2).float() / dim)
    factors = (plain / model.model.rotary_emb.inv_freq).numpy().astype(numpy.float32)
    writer.add_tensor("rope_freqs.weight", factors, raw_dtype=gguf.GGMLQuantizationType.F32)
