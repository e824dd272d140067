"""What llama.cpp fixes per architecture name, beyond what a GGUF file's metadata says."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Architecture:
    """Switches of one ``general.architecture``.

    ``permuted``: q and k rows are stored with rotary pairs adjacent. ``interleaved``: so they are rotated (MLA).
    ``narrow_experts``: without a key of their own, experts are ``feed_forward_length`` / top-k wide.
    ``scoring`` and ``renormalise`` hold where the file has no key for them.
    """

    name: str
    family: str
    moe_family: str
    needs_experts: bool = False
    mla: bool = False
    permuted: bool = False
    interleaved: bool = False
    qk_norm: str | None = None
    sinks: bool = False
    sliding: bool = False
    yarn_truncate: bool = True
    activation: str = "silu"
    expert_bias: bool = False
    scoring: str = "softmax"
    renormalise: bool = False
    narrow_experts: bool = False
    shared_experts: bool = False
    shared_gated: bool = False


ARCHITECTURES = {
    architecture.name: architecture
    for architecture in (
        Architecture("llama", "llama", "mixtral", permuted=True, renormalise=True),
        Architecture("qwen2", "qwen2", "qwen2"),
        Architecture("qwen3", "qwen3", "qwen3", qk_norm="head"),
        Architecture(
            "qwen2moe",
            "qwen2_moe",
            "qwen2_moe",
            needs_experts=True,
            narrow_experts=True,
            shared_experts=True,
            shared_gated=True,
        ),
        Architecture(
            "qwen3moe",
            "qwen3_moe",
            "qwen3_moe",
            needs_experts=True,
            qk_norm="head",
            renormalise=True,
            narrow_experts=True,
        ),
        Architecture("olmoe", "olmoe", "olmoe", needs_experts=True, qk_norm="full"),
        Architecture(
            "gpt-oss",
            "gpt_oss",
            "gpt_oss",
            needs_experts=True,
            sinks=True,
            sliding=True,
            yarn_truncate=False,  # as the model was trained; the metadata has no key for it
            activation="swigluoai",
            expert_bias=True,
            scoring="softmax_topk",
        ),
        Architecture(
            "deepseek2",
            "deepseek_v2",
            "deepseek_v2",
            needs_experts=True,
            mla=True,
            interleaved=True,
            shared_experts=True,
        ),
    )
}
