"""Models that exist on paper only, for planner and forecasts."""

from __future__ import annotations

from batchgen_lite.runtime.activations import ActivationShape
from batchgen_lite.runtime.planner import ModelSize
from batchgen_lite.runtime.rates import MachineRates, ModelWork

MIB, GIB = 1 << 20, 1 << 30
PROCESS = 280 * MIB
DISK_BOUND = MachineRates(read_rate=4e8, flops=90e9, threads=2, source="measured")
COMPUTE_BOUND = MachineRates(read_rate=4e9, flops=20e9, threads=2, source="measured")


def paper_model(weights: int = 3 * GIB + 300 * MIB, *, layers: int = 16, experts: int = 64) -> ModelSize:
    """A mixture of experts of hidden size 1024 with ``weights`` bytes in bf16, 300 MiB of them needed by all tokens."""
    dense = min(300 * MIB, weights // 4)
    routed = weights - dense
    work = ModelWork(
        dense_bytes=dense,
        routed_bytes=routed,
        dense_flops=0.8 * dense,
        expert_flops=routed / experts,
        head_flops=0.2 * dense,
        visit_flops=layers * 2 * 64 * 4 * 128.0,
        dense_widening=dense / 2 / 0.9e9,
        routed_widening=routed / 2 / 0.9e9,
        head_widening=0.0,
        experts=experts,
        top_k=8,
        group=4,
    )
    activations = ActivationShape(1024, 1536, 1024, 512, experts, 32000, 1024, 1 << 20, 2048, 21 << 20, 4, 64, 2)
    return ModelSize(
        tiles=weights,
        largest_load=8 * MIB,
        embedding=62 * MIB,
        page=layers * 4 * 128 * 64 * 2,
        activations=activations,
        skeleton=1 * MIB,
        work=work,
    )
