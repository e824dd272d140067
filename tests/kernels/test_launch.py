"""What launchers refuse and say, the configuration table, and when kernels are not available."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from batchgen_lite.errors import UnsupportedError
from batchgen_lite.kernels import availability, config
from batchgen_lite.kernels.attention.paged_launch import PageSpan, paged_attention, plan_spans
from batchgen_lite.kernels.config import Config, lookup
from batchgen_lite.kernels.experts.combine import combine
from batchgen_lite.kernels.experts.gate_up import gate_up
from batchgen_lite.kernels.experts.project import linear
from batchgen_lite.kernels.experts.weights import ENCODINGS, Scales, weight_table
from batchgen_lite.kernels.launch import OperandError, ceil_div, power_of_two, require, require_disjoint
from batchgen_lite.kernels.norm.rms import rms_norm
from batchgen_lite.kernels.rope.write import rope_write
from batchgen_lite.models.spec import FFNSpec

CPU = torch.device("cpu")


def test_operands_are_checked_one_by_one() -> None:
    x = torch.zeros(4, 6)
    require("x", x, (None, 6), torch.float32, CPU)
    with pytest.raises(OperandError, match=r"x: shape \[4, 6\], but \[any, 8\] is required"):
        require("x", x, (None, 8), torch.float32, CPU)
    with pytest.raises(OperandError, match=r"x: shape \[4, 6\], but \[4\] is required"):
        require("x", x, (4,), torch.float32, CPU)
    with pytest.raises(OperandError, match="x: dtype float32, but int32 or int64 is required"):
        require("x", x, (4, 6), (torch.int32, torch.int64), CPU)
    with pytest.raises(OperandError, match="x: lies on cpu, but the kernel runs on meta"):
        require("x", x, (4, 6), torch.float32, torch.device("meta"))
    with pytest.raises(OperandError, match=r"x: strides \[1, 4\], but the last 1 dimension"):
        require("x", x.reshape(6, 4).t(), (4, 6), torch.float32, CPU)
    require("x", torch.zeros(4, 12)[:, :6], (4, 6), torch.float32, CPU)
    with pytest.raises(OperandError, match="the last 2 dimension"):
        require("x", torch.zeros(4, 12)[:, :6], (4, 6), torch.float32, CPU, dense=2)


def test_outputs_may_not_overlap_inputs() -> None:
    memory = torch.zeros(24)
    require_disjoint("out", memory[:12], {"x": memory[12:], "none": None})
    with pytest.raises(OperandError, match="out overlaps x in memory"):
        require_disjoint("out", memory[:13], {"x": memory[12:]})
    with pytest.raises(OperandError, match="out overlaps partial"):
        combine(memory.view(4, 6), memory[:12].view(2, 6), 2)
    qkv, angles = torch.zeros(2, 96), torch.zeros(2, 8)
    pool = torch.zeros(1, 1, 64, 16)
    with pytest.raises(OperandError, match="q_out overlaps qkv"):
        rope_write(
            qkv, angles, angles, torch.zeros(2, dtype=torch.int64), qkv[:, :64].unflatten(1, (4, 16)), pool, pool
        )


def test_tables_refuse_what_does_not_fit() -> None:
    arena = torch.zeros(1000, dtype=torch.uint8)
    with pytest.raises(OperandError, match=r"data at \[900, 1028\) end behind the arena's 1000 bytes"):
        weight_table(arena, "F32", 2, 16, [0, 900])
    with pytest.raises(OperandError, match="data at byte 6: this format needs a multiple of 4"):
        weight_table(arena, "F32", 2, 16, [6])
    with pytest.raises(UnsupportedError, match="no kernel decodes weights stored as IQ1_S"):
        weight_table(arena, "IQ1_S", 2, 16, [0])
    with pytest.raises(UnsupportedError, match="Q8_0 weights with 48 columns: a multiple of 32"):
        weight_table(arena, "Q8_0", 2, 48, [0])
    with pytest.raises(OperandError, match="INT8 weights need scale_offsets"):
        weight_table(arena, "INT8", 2, 16, [0])
    with pytest.raises(OperandError, match=r"scales at \[996, 1004\)"):
        weight_table(arena, "INT8", 2, 16, [0], scale_offsets=[996])
    with pytest.raises(UnsupportedError, match="groups of 24"):
        weight_table(arena, "INT8", 2, 48, [0], scales=Scales("fp32", 24), scale_offsets=[100])
    with pytest.raises(UnsupportedError, match="e8m0 belongs to MXFP4_BLOCKS"):
        weight_table(arena, "INT8", 2, 32, [0], scales=Scales("e8m0", 32), scale_offsets=[100])
    with pytest.raises(OperandError, match="zero points are for INT4"):
        weight_table(arena, "INT4", 2, 32, [0], scales=Scales("fp16", 32, zeros=True), scale_offsets=[100])
    with pytest.raises(OperandError, match="a flat contiguous uint8 tensor is required"):
        weight_table(arena.view(2, 500), "F32", 2, 16, [0])


def test_tables_know_their_bytes_and_alignment() -> None:
    arena = torch.zeros(1 << 16, dtype=torch.uint8)
    assert weight_table(arena, "Q4_K", 4, 512, [0]).nbytes() == 4 * 2 * 144
    assert weight_table(arena, "INT4", 4, 64, [0], scales=Scales("fp16", 32, zeros=True), scale_offsets=[512],
                        zero_offsets=[1024]).nbytes() == 4 * 32 + 4 * 2 * 3  # fmt: skip
    fp8 = weight_table(arena, "F8_E4M3", 130, 200, [0], scales=Scales("fp32", 128, 128), scale_offsets=[32768])
    assert fp8.nbytes() == 130 * 200 + 2 * 2 * 4
    base = weight_table(arena, "BF16", 2, 64, [0, 128]).alignment
    assert base in (2, 4, 8, 16)
    assert weight_table(arena, "BF16", 2, 64, [0, 2]).alignment == 2
    table = weight_table(arena, "F32", 2, 16, [256, -1])
    assert table.table.tolist() == [[256, 0, 0], [0, 0, 0]]


def test_launchers_refuse_operands_that_do_not_fit_together() -> None:
    arena = torch.zeros(4096, dtype=torch.uint8)
    gate, up = weight_table(arena, "F32", 8, 16, [0]), weight_table(arena, "F32", 6, 16, [1024])
    x, one = torch.zeros(2, 16), torch.zeros(2, dtype=torch.int32)
    with pytest.raises(OperandError, match="gate and up differ in rows: 8 and 6"):
        gate_up(x, gate, up, one, one, one[:1], FFNSpec(8), torch.zeros(2, 8))
    with pytest.raises(OperandError, match=r"rows \[4, 12\) reach beyond the width 8"):
        gate_up(x, gate, gate, one, one, one[:1], FFNSpec(8), torch.zeros(2, 8), column0=4)
    with pytest.raises(OperandError, match="a table of 2 matrices, but a dense layer has one"):
        linear(x, weight_table(arena, "F32", 8, 16, [0, 512]), torch.zeros(2, 8))
    with pytest.raises(OperandError, match="post: norm on a module's output needs the residual"):
        rms_norm(x, torch.ones(16), 1e-5, torch.zeros(2, 16), post=True)
    with pytest.raises(OperandError, match="rows must lie within the 3 packed tokens"):
        plan_spans([PageSpan(0, 0, 2, 2)], 3, 1, Config(1, 1, block_m=16, split=8), CPU)
    plan = plan_spans([PageSpan(0, 0, 0, 2)], 2, 2, Config(1, 1, block_m=16, block_k=64, split=8), CPU)
    query, pool = torch.zeros(2, 4, 16), torch.zeros(1, 2, 64, 16)
    table, short = torch.zeros(1, 1, dtype=torch.int32), torch.zeros(10)
    with pytest.raises(OperandError, match="workspace: 10 elements, but 1 splits of 2 tokens need 144"):
        paged_attention(query, pool, pool, table, plan, torch.zeros(2, 4, 16), short, scale=1.0)
    with pytest.raises(OperandError, match="keys: dtype float16, but float32 is required"):
        paged_attention(query, pool.half(), pool, table, plan, torch.zeros(2, 4, 16), torch.zeros(144), scale=1.0)


def test_configurations_depend_on_the_key_alone() -> None:
    with pytest.raises(UnsupportedError, match="no kernel configuration for attention with dtype fp32, N=1, K=576"):
        lookup("attention", capability="8.9", dtype="fp32", n=1, k=576)
    assert lookup("down", capability="8.9", dtype="Q4_K", n=2048, k=768) == lookup(
        "down", capability="8.9", dtype="Q4_K", n=2048, k=768
    )


@pytest.mark.parametrize("op", ["gate_up", "down", "linear"])
@pytest.mark.parametrize("encoding", list(ENCODINGS))
@pytest.mark.parametrize("compute", ["fp32", "fp16", "bf16"])
def test_every_encoding_has_a_tile_that_it_can_fill(op: str, encoding: str, compute: str) -> None:
    found = lookup(op, capability="any", dtype=encoding, compute=compute, n=4096, k=4096)
    assert found.block_k % ENCODINGS[encoding].min_block_k == 0
    assert found.block_k // ENCODINGS[encoding].parts >= 16  # the least depth of a tensor-core product


def test_no_rule_hides_another() -> None:
    """Conditions know no more keys than the look-up, and every rule but the last has some."""
    for rules in config.all_rules().values():
        for number, rule in enumerate(rules):
            assert set(rule) <= {"when", "use"}
            assert set(rule.get("when", {})) <= {"capability", "dtype", "compute", "max_n", "max_k"}
            assert rule.get("when") or number == len(rules) - 1


def test_availability_says_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert availability.unavailable_reason(CPU) is None
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert "only under the interpreter" in str(availability.unavailable_reason(CPU))
    assert "meta" in str(availability.unavailable_reason(torch.device("meta")))
    assert availability.capability_reason((8, 0), "A100") is None
    assert availability.capability_reason((12, 0), "RTX 5090") is None
    assert "Quadro RTX 4000 has compute capability 7.5" in str(
        availability.capability_reason((7, 5), "Quadro RTX 4000")
    )
    assert availability.preferred_dtype((8, 6)) == torch.bfloat16
    assert availability.preferred_dtype((7, 5)) == torch.float16
    cuda: Any = torch.cuda
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "no CUDA support" in str(availability.unavailable_reason(torch.device("cuda")))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(cuda, "is_available", lambda: False)
    assert "no usable CUDA device" in str(availability.unavailable_reason(torch.device("cuda")))
    monkeypatch.setattr(cuda, "is_available", lambda: True)
    monkeypatch.setattr(cuda, "device_count", lambda: 1)
    assert "no CUDA device 3; this machine has 1" in str(availability.unavailable_reason(torch.device("cuda:3")))
    monkeypatch.setattr(cuda, "get_device_capability", lambda index: (6, 1))
    monkeypatch.setattr(cuda, "get_device_name", lambda index: "GTX 1080")
    assert "GTX 1080 has compute capability 6.1" in str(availability.unavailable_reason(torch.device("cuda:0")))
    monkeypatch.setattr(availability.importlib.util, "find_spec", lambda name: None)
    assert "triton is not installed" in str(availability.unavailable_reason(torch.device("cuda:0")))


def test_sizes() -> None:
    assert [power_of_two(n) for n in (0, 1, 2, 3, 64, 65)] == [1, 1, 2, 4, 64, 128]
    assert [ceil_div(n, 4) for n in (0, 1, 4, 5)] == [0, 1, 1, 2]
    assert np.all([ceil_div(n, 7) * 7 >= n for n in range(50)])
