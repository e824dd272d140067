"""How fast a machine is and how much work a model is: together they give a sweep's cost. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass, replace

from batchgen_lite.runtime.compute_times import ComputeTimes, Curve
from batchgen_lite.runtime.cost import SweepCost

ASSUMED_READ_RATE = 1.0e9  # bytes/s: a slow NVMe drive or a fast SATA one
ASSUMED_FLOPS = 40e9  # a thread, fp32 with AVX2

# Shares of the matrix product rate that cores reach, all else that goes on beside the products counted in; measured
# with made-up weights of a model of 1,024 channels (compute_probe.py): experts 0.6 to 0.8, what all tokens need 0.3 to
# 0.5 (more where channels are many), the head 0.6 to 1.2, pages 0.5 to 1.1 without what a page costs by itself.
EXPERT_SHARE, DENSE_SHARE, HEAD_SHARE, ATTENTION_SHARE = 0.7, 0.45, 0.8, 0.7
FIXED_SECONDS = 0.004  # a sweep's hand-over, planning and first tile

WIDENING_SHARE = 0.8  # of the rates below, with the gathering of rows and all calls; measured: 0.5 to 1.1

# Elements/s that one core widens to fp32, measured on 2020 laptop-class cores; what is not listed: OTHER_WIDENING.
WIDENING = {
    "BF16": 0.9e9,
    "F16": 0.9e9,
    "Q8_0": 2.0e9,
    "Q4_0": 1.0e9,
    "Q4_1": 0.75e9,
    "Q4_K": 0.87e9,
    "MXFP4": 0.6e9,
}
OTHER_WIDENING = 0.7e9


@dataclass(frozen=True, slots=True)
class MachineRates:
    """``read_rate`` bytes/s from the disk while the cores compute; ``flops`` FLOP/s of matrix products while nothing is
    read, and ``drag`` the seconds that computing takes longer for each byte read beside it; ``threads`` that widen
    weights, 0 where kernels take them packed. ``link_rate``: bytes/s to an accelerator, 0 without one.
    ``times``: of the model's own kernels on these cores, None where they follow from ``flops``. ``source``:
    "measured", "cached", "assumed", or a profile's name."""

    read_rate: float
    flops: float
    threads: int
    link_rate: float = 0.0
    source: str = "assumed"
    drag: float = 0.0
    times: ComputeTimes | None = None

    @property
    def known(self) -> MachineRates | None:
        """These, if they are to decide how memory is divided; what is merely assumed decides nothing."""
        return None if self.source == "assumed" else self

    def with_cores(self, factor: float) -> MachineRates:
        """With cores ``factor`` times as fast, or as many."""
        times = None if self.times is None else self.times.scaled(1.0 / factor)
        return replace(self, flops=self.flops * factor, threads=round(self.threads * factor), times=times)


def assumed_rates(threads: int) -> MachineRates:
    """For models too small to be worth a measurement."""
    return MachineRates(ASSUMED_READ_RATE, ASSUMED_FLOPS * threads, threads)


@dataclass(frozen=True, slots=True)
class ModelWork:
    """A model's work. Bytes as they lie in memory; FLOP: ``dense`` a token, ``expert`` a row of one expert in every
    layer that has experts, ``head`` a row of logits, ``visit`` a query row against a page in all layers; widening in
    seconds of one core. ``group``: query heads that share a KV head."""

    dense_bytes: int
    routed_bytes: int
    dense_flops: float
    expert_flops: float
    head_flops: float
    visit_flops: float
    dense_widening: float
    routed_widening: float
    head_widening: float
    experts: int
    top_k: int
    group: int


def sweep_cost(work: ModelWork, rates: MachineRates, resident: int, *, all_resident: bool = False) -> SweepCost:
    """The cost of sweeps with ``resident`` bytes of tiles in memory, what every sweep needs before experts (as
    offload/residents.py chooses)."""
    resident = work.dense_bytes + work.routed_bytes if all_resident else max(0, resident)
    dense = min(resident, work.dense_bytes)
    routed = min(resident - dense, work.routed_bytes)
    times = rates.times or expected_times(work, rates)
    return SweepCost(
        streamed_bytes=work.dense_bytes - dense,
        bytes_per_second=rates.read_rate,
        fixed_seconds=FIXED_SECONDS,
        resident_bytes=dense + routed,
        routed_bytes=work.routed_bytes - routed,
        experts=work.experts,
        choice=work.top_k / work.experts if work.experts else 1.0,
        dense=times.dense,
        expert=times.expert,
        head=times.head,
        seconds_per_visit=times.visit,
        drag_seconds_per_byte=rates.drag,
        linked_bytes=work.dense_bytes + work.routed_bytes if rates.link_rate else 0,
        link_bytes_per_second=rates.link_rate,
    )


def expected_times(work: ModelWork, rates: MachineRates) -> ComputeTimes:
    """What kernels take on a machine of which only rates are known. An accelerator is taken at its rate: how much of it
    its kernels reach has not been measured."""
    experts = max(1, work.experts)
    if not rates.threads:
        return ComputeTimes(
            dense=Curve.line(0.0, work.dense_flops / rates.flops),
            expert=Curve.line(0.0, work.expert_flops / rates.flops),
            head=Curve.line(0.0, work.head_flops / rates.flops),
            visit=work.visit_flops / rates.flops,
        )
    a_core = 1.0 / (rates.threads * WIDENING_SHARE)
    return ComputeTimes(
        dense=Curve.line(work.dense_widening * a_core, work.dense_flops / (rates.flops * DENSE_SHARE)),
        expert=Curve.line(work.routed_widening * a_core / experts, work.expert_flops / (rates.flops * EXPERT_SHARE)),
        head=Curve.line(work.head_widening * a_core, work.head_flops / (rates.flops * HEAD_SHARE)),
        visit=work.visit_flops / (rates.flops * ATTENTION_SHARE),
    )
