"""Tiny random checkpoints of every family, made with transformers, which is also the truth to compare with.

    model = tiny_checkpoint("qwen3_moe", tmp_path, num_hidden_layers=3, dtype="bfloat16", shards=2)

writes config.json, generation_config.json and safetensors into ``tmp_path`` and returns the transformers model in
fp32 and eval mode, its weights being exactly the stored ones. Sizes are odd on purpose (hidden sizes that are no
powers of two, head_dim != hidden / heads, expert counts beside powers of two) and weights are drawn so that norms,
biases, routers and logits all matter.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

_SHARED: dict[str, Any] = {
    "vocab_size": 211,
    "hidden_size": 72,
    "intermediate_size": 88,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN_MLA = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "mscale": 0.707,
    "mscale_all_dim": 0.9,
    "beta_fast": 32,
    "beta_slow": 1,
    "original_max_position_embeddings": 64,
}
_MLA = {
    "num_key_value_heads": 6,
    "kv_lora_rank": 20,
    "q_lora_rank": None,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "moe_intermediate_size": 28,
    "n_routed_experts": 12,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"head_dim": 20, "num_key_value_heads": 1},
    "llama3": {"head_dim": 20, "rope_parameters": _LLAMA3, "tie_word_embeddings": True},
    "mistral": {"head_dim": 20, "sliding_window": 37},
    "qwen2": {"use_sliding_window": True, "sliding_window": 29, "max_window_layers": 1},
    "qwen3": {"head_dim": 20, "tie_word_embeddings": True},
    "mixtral": {"head_dim": 20, "num_local_experts": 8, "num_experts_per_tok": 2},
    "olmoe": {"num_key_value_heads": 6, "num_experts": 12, "num_experts_per_tok": 4, "intermediate_size": 36},
    "qwen2_moe": {
        "num_key_value_heads": 3,
        "num_experts": 10,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 28,
        "shared_expert_intermediate_size": 44,
        "mlp_only_layers": [0],
    },
    "qwen3_moe": {
        "head_dim": 20,
        "num_experts": 24,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 28,
        "norm_topk_prob": True,
    },
    "gpt_oss": {
        "head_dim": 20,
        "num_local_experts": 10,
        "num_experts_per_tok": 4,
        "intermediate_size": 36,
        "sliding_window": 24,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 8.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 64,
        },
    },
    "deepseek_v2": {
        **_MLA,
        "topk_method": "group_limited_greedy",
        "n_group": 3,
        "topk_group": 2,
        "routed_scaling_factor": 1.7,
        "rope_parameters": _YARN_MLA,
    },
    "deepseek_v2_lite": {**_MLA, "topk_method": "greedy", "n_group": 1, "topk_group": 1},
    "deepseek_v3": {
        **_MLA,
        "q_lora_rank": 26,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 2.5,
        "rope_parameters": _YARN_MLA,
    },
    "glm4_moe": {
        "head_dim": 20,
        "moe_intermediate_size": 28,
        "n_routed_experts": 12,
        "num_experts_per_tok": 3,
        "use_qk_norm": True,
        "attention_bias": True,
        "routed_scaling_factor": 1.4,
    },
    "glm4_moe_lite": {**_MLA, "q_lora_rank": 26, "n_shared_experts": 1, "n_group": 1, "topk_group": 1},
    "granitemoe": {
        "num_local_experts": 12,
        "num_experts_per_tok": 5,
        "intermediate_size": 28,
        "embedding_multiplier": 1.5,
        "residual_multiplier": 0.4,
        "attention_multiplier": 0.2,
        "logits_scaling": 1.5,
        "tie_word_embeddings": True,
    },
    "granitemoeshared": {
        "num_local_experts": 12,
        "num_experts_per_tok": 5,
        "intermediate_size": 28,
        "shared_intermediate_size": 36,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.4,
        "attention_multiplier": 0.2,
        "logits_scaling": 1.5,
    },
}
_MODEL_TYPE = {"llama3": "llama", "deepseek_v2_lite": "deepseek_v2"}
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def tiny_config(family: str, **overrides: Any) -> Any:
    """The transformers configuration of the tiny model."""
    from transformers import AutoConfig

    fields = {**_SHARED, **FAMILIES[family], **overrides}
    if family == "glm4_moe_lite":
        fields.pop("first_k_dense_replace")
    return AutoConfig.for_model(_MODEL_TYPE.get(family, family), **fields)


def tiny_model(family: str, *, seed: int = 0, dtype: str = "float32", **overrides: Any) -> Any:
    """A random transformers model, fp32 and in eval mode, its weights rounded to ``dtype``."""
    from transformers import AutoModelForCausalLM

    config = tiny_config(family, **overrides)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(seed)
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    with torch.no_grad():
        for name, tensor in sorted(tensors.items()):
            if name in model.state_dict():  # not the recomputed rotary buffers
                spread = _spread(name, tensor, transposed_experts=config.model_type == "gpt_oss")
                drawn = torch.randn(tensor.shape, generator=generator) * spread + _mean(name)
                tensor.copy_(drawn.to(_DTYPES[dtype]).float() if _rounded(name) else drawn)
    return model


def _mean(name: str) -> float:
    return 1.0 if "norm" in name else 0.0


def _spread(name: str, tensor: torch.Tensor, *, transposed_experts: bool) -> float:
    """The standard deviation to draw with: 1 / sqrt(fan-in), so that activations keep their size."""
    if "norm" in name or "bias" in name:
        return 0.1
    if tensor.dim() == 1:
        return 1.0  # sinks
    if "embed_tokens" in name:
        return 0.25
    fan_in = tensor.shape[1] if transposed_experts and tensor.dim() == 3 else tensor.shape[-1]
    decisive = "lm_head" in name or ".gate.weight" in name or "router" in name
    return (2.0 if decisive else 1.0) / math.sqrt(fan_in)


def _rounded(name: str) -> bool:
    return "e_score_correction_bias" not in name  # stays fp32 in checkpoints


def tiny_checkpoint(
    family: str,
    path: Path,
    *,
    seed: int = 0,
    dtype: str = "float32",
    shards: int = 1,
    experts: str = "separate",
    config_changes: dict[str, Any] | None = None,
    **overrides: Any,
) -> Any:
    """Write a checkpoint into ``path`` and return its transformers model (see the head of this file).

    ``experts``: "separate", as the hub has them (what save_pretrained writes), or "stacked", one tensor for all, as
    transformers 5 holds them. ``shards`` > 1 writes an index. ``config_changes``: keys to set in config.json
    afterwards, or to remove where the value is ``...``. ``overrides`` are configuration fields.
    """
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    model = tiny_model(family, seed=seed, dtype=dtype, **overrides)
    stored = _published_tensors(model, path) if experts == "separate" else _own_tensors(model)
    stored = {
        name: (tensor.to(_DTYPES[dtype]) if _rounded(name) else tensor).contiguous() for name, tensor in stored.items()
    }
    write_safetensors(path, stored, shards)
    model.config.save_pretrained(path)
    model.generation_config.save_pretrained(path)
    change_json(
        path / "config.json", {"dtype": dtype, "architectures": [type(model).__name__], **(config_changes or {})}
    )
    return model


def _own_tensors(model: Any) -> dict[str, torch.Tensor]:
    tied = model.config.tie_word_embeddings
    return {name: t.clone() for name, t in model.state_dict().items() if not (tied and name == "lm_head.weight")}


def _published_tensors(model: Any, path: Path) -> dict[str, torch.Tensor]:
    """The tensors under the names, and in the layout, that save_pretrained writes."""
    from safetensors.torch import load_file

    model.save_pretrained(path)
    file = path / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
    file.unlink()
    return tensors


def write_safetensors(path: Path, tensors: dict[str, torch.Tensor], shards: int = 1) -> None:
    """One model.safetensors, or ``shards`` files and their index, tensors dealt out in turn."""
    if shards == 1:
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
        return
    files = [f"model-{number + 1:05d}-of-{shards:05d}.safetensors" for number in range(shards)]
    where = {name: files[index % shards] for index, name in enumerate(sorted(tensors))}
    for file in files:
        save_file({n: t for n, t in tensors.items() if where[n] == file}, path / file, metadata={"format": "pt"})
    total = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))


def change_json(file: Path, changes: dict[str, Any]) -> None:
    """Set keys of a JSON file; ``...`` removes the key."""
    content = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({key: value for key, value in content.items() if value is not ...}))


def expert_numbers(names: list[str]) -> set[int]:
    """The expert numbers that occur in one-by-one tensor names."""
    return {int(match[1]) for name in names if (match := re.search(r"experts\.(\d+)\.", name))}
